"""Reductions over dimensions."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._traced import EXPECTED, FLOATING, check_dtype, kind_of, name_of
from torchkiln.ops.eager import eager


@eager(_C.sum, input="x", axis="dim")
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
    on the CPU for any number of threads. The sum of no elements is 0. If a partial sum overflows,
    the result is still right on the CPU; on CUDA it is infinite or NaN, as in torch.

    Integers and bools are summed by :func:`torch.sum`, in int64 or in ``dtype``.

    Args:
        x: any shape; float32, float64, float16, bfloat16, an integer dtype or bool.
        dim: the dimensions that are summed; all when it is None or empty.
        keepdim: whether these dimensions stay, with size 1.
        dtype: of the result, one of the dtypes of ``x``; None for the dtype of ``x``, or for int64
            if ``x`` holds integers or bools.
    """
    check_real("sum", "x", f"dtype {name_of(x.dtype)}", x.dtype)
    if dtype is not None:
        check_real("sum", "dtype", name_of(dtype), dtype)
    return torch.sum(x, dim, keepdim, dtype=dtype)


@eager(_C.mean, input="x", axis="dim")
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
        x: any shape; float32, float64, float16 or bfloat16; with ``dtype`` integers and bools, too.
        dim: the dimensions that are averaged over; all when it is None or empty.
        keepdim: whether these dimensions stay, with size 1.
        dtype: of the result, one of the four floating dtypes; None for the dtype of ``x``.
    """
    if not is_integer(x.dtype):
        check_dtype("mean", "x", x)
    elif dtype is None:
        raise RuntimeError(
            f"torchkiln.mean: x: got dtype {name_of(x.dtype)}, {EXPECTED}; pass "
            "dtype=torch.float32 to average integers"
        )
    if dtype is not None and dtype not in FLOATING:
        raise RuntimeError(f"torchkiln.mean: dtype: got {name_of(dtype)}, {EXPECTED}")
    return torch.mean(x, dim, keepdim, dtype=dtype)


def is_integer(dtype: torch.dtype) -> bool:
    """Whether a dtype holds integers or bools."""
    return kind_of(dtype) < 2


def check_real(op: str, name: str, got: str, dtype: torch.dtype) -> None:
    """Refuses dtypes that are neither supported by the kernels nor integers nor bool."""
    if dtype not in FLOATING and not is_integer(dtype):
        raise RuntimeError(
            f"torchkiln.{op}: {name}: got {got}, {EXPECTED}, an integer dtype or bool"
        )
