"""Checks and type promotion for graphs, where the body of an op consists of ATen's ops.

Rules and messages equal those of the C++ code (checks.h, promotion.h).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EXPECTED = "expected one of float32, float64, float16, bfloat16"


def check_dtype(op: str, name: str, tensor: Tensor) -> None:
    """Refuses a tensor that is not floating point."""
    if tensor.dtype not in FLOATING:
        raise RuntimeError(f"torchkiln.{op}: {name}: got dtype {name_of(tensor.dtype)}, {EXPECTED}")


def check_same_dtype(op: str, name: str, tensor: Tensor, like: str, x: Tensor) -> None:
    """Refuses a tensor whose dtype is not that of ``x``."""
    if tensor.dtype != x.dtype:
        raise RuntimeError(
            f"torchkiln.{op}: {name}: got dtype {name_of(tensor.dtype)}, expected "
            f"{name_of(x.dtype)}, the dtype of {like}"
        )


def check_no_gradient(op: str, name: str, *tensors: Tensor | None) -> None:
    """Refuses to write over a tensor where autograd would need a gradient of it."""
    # `is True`: requires_grad of a torch.fx.Proxy is a Proxy, which has no truth value.
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad is True for t in tensors):
        raise RuntimeError(
            f"torchkiln.{op}: {name}: got tensors that require a gradient, expected none: the "
            "call has no gradient; use torch.no_grad() or torch.inference_mode()"
        )


def check_shape(op: str, name: str, tensor: Tensor, like: str, x: Tensor, remedy: str = "") -> None:
    """Refuses a tensor whose shape is not that of ``x``."""
    if tensor.shape != x.shape:
        raise RuntimeError(
            f"torchkiln.{op}: {name}: got shape {list(tensor.shape)}, expected {list(x.shape)}, "
            f"the shape of {like}{remedy}"
        )


def promoted_dtype(
    op: str, operands: Mapping[str, Tensor | float], *, factors: int = 0
) -> torch.dtype:
    """The dtype of an elementwise result, as in torch; an error if it is not supported.

    Args:
        op: the name in the error.
        operands: the operands by their names.
        factors: how many of the first operands are multiplied before the others are added. The
            product counts as a tensor with dimensions if a factor is one.
    """
    places = [place_of(operand) for operand in operands.values()]
    if factors:
        product = joined(places[:factors]), min(group for _, group in places[:factors])
        result = joined([product, *places[factors:]])
    else:
        result = joined(places)
    if result not in FLOATING:
        given = [dtype_of(operand) for operand in operands.values()]
        names = [name_of(dtype) for dtype in given]
        dtypes = f"{', '.join(names[:-1])} and {names[-1]}"
        raise RuntimeError(
            f"torchkiln.{op}: {', '.join(operands)}: got dtypes {dtypes}, which "
            f"promote to {name_of(result)}, {EXPECTED}"
        )
    return result


def dtype_of(operand: object) -> torch.dtype:
    """The dtype of a tensor, or of the tensor that torch makes from a number."""
    if isinstance(operand, Tensor):
        return operand.dtype
    if isinstance(operand, bool):
        return torch.bool
    return torch.float64 if isinstance(operand, (float, torch.SymFloat)) else torch.int64


def place_of(operand: Tensor | float) -> tuple[torch.dtype, int]:
    """The dtype with which an operand takes part in promotion, and its group.

    Tensors with dimensions are group 0, 0-dimensional tensors 1, numbers 2. A later group changes
    the result only if its kind of dtype (bool, integer, floating point, complex) is higher.
    """
    dtype = dtype_of(operand)
    if isinstance(operand, Tensor):
        return dtype, 0 if operand.dim() > 0 else 1
    return torch.get_default_dtype() if dtype == torch.float64 else dtype, 2


def joined(places: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype to which operands promote together."""
    groups: list[torch.dtype | None] = [None, None, None]
    for dtype, group in places:
        before = groups[group]
        groups[group] = dtype if before is None else torch.promote_types(before, dtype)
    result = combined(groups[0], combined(groups[1], groups[2]))
    assert result is not None  # there is at least one operand
    return result


def combined(first: torch.dtype | None, later: torch.dtype | None) -> torch.dtype | None:
    """The promoted dtype of a group of operands and a later group."""
    if first is None or later is None:
        return later if first is None else first
    if kind_of(later) > kind_of(first):
        return torch.promote_types(first, later)
    return first


def kind_of(dtype: torch.dtype) -> int:
    """The rank of a dtype in a promotion: bool 0, integers 1, floating point 2, complex 3."""
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)


def name_of(dtype: torch.dtype) -> str:
    """The dtype as messages name it."""
    return str(dtype).removeprefix("torch.")
