"""Sums and products of elements, with broadcasting and dtype promotion."""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_variadic

from torchkiln import _C


def add(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a + b``.

    Shapes and dtypes follow :func:`torch.add`: ``a`` and ``b`` broadcast, and their dtypes are
    promoted. The promoted dtype must be float32, float64, float16 or bfloat16.

    Args:
        a: any shape.
        b: any shape that broadcasts with that of ``a``.
    """
    if is_compiling():
        return torch.add(a, b)
    if has_torch_function_variadic(a, b):
        seen: Tensor = torch.ops.torchkiln.add.default(a, b)
        return seen
    return _C.add(a, b)


def muladd(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Returns ``a * b + c``, rounded once.

    Shapes, dtypes and layout follow :func:`torch.add`: all three broadcast, and their dtypes are
    promoted; a number takes part as in ``tensor + number``. The promoted dtype must be float32,
    float64, float16 or bfloat16.

    Args:
        a: any shape, or a number.
        b: any shape that broadcasts with that of ``a``, or a number.
        c: any shape that broadcasts with that of ``a * b``, or a number.
    """
    if is_compiling() or has_torch_function_variadic(a, b, c):
        if is_compiling() or not all(isinstance(value, Tensor) for value in (a, b, c)):
            composed: Tensor = a * b + c  # type: ignore[assignment]
            return composed
        seen: Tensor = torch.ops.torchkiln.muladd.default(a, b, c)
        return seen
    return _C.muladd(a, b, c)
