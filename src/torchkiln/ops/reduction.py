"""Reductions over dimensions."""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_unary

from torchkiln import _C


def sum(
    x: Tensor,
    dim: int | tuple[int, ...] | list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the sum of ``x`` over ``dim``, contiguous.

    It is accumulated in float32 (float64 when ``x`` or ``dtype`` is float64), in blocks, so that
    2**31 ones add up to 2**31, and rounded once. It is bitwise the same from run to run, and on the
    CPU for any number of threads. The sum of no elements is 0.

    Args:
        x: any shape; float32, float64, float16 or bfloat16.
        dim: the dimensions that are summed; all when it is None or empty.
        keepdim: whether these dimensions stay, with size 1.
        dtype: of the result, one of the four; that of ``x`` when it is None.
    """
    if is_compiling():
        return torch.sum(x, dim, keepdim, dtype=dtype)
    if has_torch_function_unary(x):
        traced: Tensor = torch.ops.torchkiln.sum.default(x, dim, keepdim, dtype=dtype)
        return traced
    return _C.sum(x, dim, keepdim, dtype)


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
    if is_compiling():
        return torch.mean(x, dim, keepdim, dtype=dtype)
    if has_torch_function_unary(x):
        traced: Tensor = torch.ops.torchkiln.mean.default(x, dim, keepdim, dtype=dtype)
        return traced
    return _C.mean(x, dim, keepdim, dtype)
