"""Reductions over dimensions."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._traced import check_dtype
from torchkiln.ops.eager import eager


@eager(_C.sum)
def sum(
    x: Tensor,
    dim: int | tuple[int, ...] | list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the sum of ``x`` over ``dim``, contiguous.

    Elements are accumulated in float32 (float64 if ``x`` or ``dtype`` is float64) in blocks, and
    the result is rounded once: the sum of 2**31 ones is exact. Results are bitwise reproducible,
    on the CPU for any number of threads. The sum of no elements is 0.

    Args:
        x: any shape; float32, float64, float16 or bfloat16.
        dim: the dimensions that are summed; all when it is None or empty.
        keepdim: whether these dimensions stay, with size 1.
        dtype: of the result, one of the four; that of ``x`` when it is None.
    """
    check_dtype("sum", "x", x)
    return torch.sum(x, dim, keepdim, dtype=dtype)


@eager(_C.mean)
def mean(
    x: Tensor,
    dim: int | tuple[int, ...] | list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the mean of ``x`` over ``dim``: :func:`sum` divided by the number of terms.

    The division comes before the result is rounded. The mean of no elements is NaN.

    Args:
        x: any shape; float32, float64, float16 or bfloat16.
        dim: the dimensions that are averaged over; all when it is None or empty.
        keepdim: whether these dimensions stay, with size 1.
        dtype: of the result, one of the four; that of ``x`` when it is None.
    """
    check_dtype("mean", "x", x)
    return torch.mean(x, dim, keepdim, dtype=dtype)
