"""Elementwise sums and products, with broadcasting and dtype promotion."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._eager import eager


@eager(_C.add)
def add(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a + b``.

    Shapes and dtypes follow :func:`torch.add`: ``a`` and ``b`` broadcast, and their dtypes are
    promoted. The promoted dtype must be float32, float64, float16 or bfloat16.

    Args:
        a: any shape.
        b: any shape that broadcasts with that of ``a``.
    """
    return torch.add(a, b)


@eager(_C.muladd)
def muladd(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Returns ``a * b + c``, rounded once.

    Shapes, dtypes and layout follow :func:`torch.add`: all three broadcast, and their dtypes are
    promoted; a number promotes as in ``tensor + number``. The promoted dtype must be float32,
    float64, float16 or bfloat16.

    Args:
        a: any shape, or a number.
        b: any shape that broadcasts with that of ``a``, or a number.
        c: any shape that broadcasts with that of ``a * b``, or a number.
    """
    return a * b + c  # type: ignore[return-value]
