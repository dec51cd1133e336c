"""Elementwise sums and products, with broadcasting and dtype promotion."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._traced import promoted_dtype
from torchkiln.ops.eager import eager


@eager(_C.add)
def add(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a + b``.

    Shapes and dtypes follow :func:`torch.add`: ``a`` and ``b`` broadcast, and their dtypes are
    promoted. The promoted dtype must be float32, float64, float16 or bfloat16.

    Args:
        a: any shape.
        b: any shape that broadcasts with that of ``a``.
    """
    promoted_dtype("add", {"a": a, "b": b})
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
    dtype = promoted_dtype("muladd", {"a": a, "b": b, "c": c})
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    x, y, z = (t.to(compute) if isinstance(t, Tensor) else t for t in (a, b, c))
    total = x * y + z
    if not isinstance(total, Tensor):  # of numbers alone
        total = torch.tensor(total, dtype=dtype)
    return total.to(dtype)
