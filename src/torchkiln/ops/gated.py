"""Gated linear units: ``act(gate) * up`` in one pass over memory."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from torchkiln import _C
from torchkiln.ops._traced import (
    FLOATING,
    check_dtype,
    check_no_gradient,
    check_same_dtype,
    check_shape,
)
from torchkiln.ops.activation import is_tanh
from torchkiln.ops.eager import eager

BROADCAST = "; to broadcast, pass *torch.broadcast_tensors(gate, up)"


@eager(_C.swiglu, beside=("out",))
def swiglu(gate: Tensor, up: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Returns ``silu(gate) * up``, where ``silu(x)`` is ``x / (1 + exp(-x))``.

    The result is contiguous. If ``gate`` and ``up`` are dense in the same other order, such as two
    transposed matrices, it has the strides of ``gate``.

    Args:
        gate: any shape; float32, float64, float16 or bfloat16. Half precision is computed in
            float32 and rounded once. Without ``up`` the shape is ``[..., 2 * columns]``, the
            halves of the last dimension are gate and up, and the result is ``[..., columns]``.
        up: of the shape of ``gate``. The result has the wider dtype of the two; half precision and
            float32 are read together, without a copy.
        out: a contiguous tensor of the shape and dtype of the result, which may be ``gate`` if
            ``up`` is given; for inference: the call has no gradient.
    """
    if out is not None:
        check_no_gradient("swiglu", "out", gate, up, out)
        torch.ops.torchkiln._swiglu_out.default(gate, up, out)
        return out
    first, second = _halves("swiglu", gate, up)
    return F.silu(first) * second


def geglu(
    gate: Tensor, up: Tensor | None = None, approximate: Literal["none", "tanh"] = "none"
) -> Tensor:
    """Returns ``gelu(gate) * up``, with the strides of :func:`swiglu`.

    Args:
        gate: as for :func:`swiglu`.
        up: as for :func:`swiglu`.
        approximate: ``"none"``, or ``"tanh"`` for :func:`gelu_tanh`.
    """
    return geglu_tanh(gate, up) if is_tanh(approximate, "geglu") else _geglu(gate, up)


@eager(_C.geglu)
def _geglu(gate: Tensor, up: Tensor | None) -> Tensor:
    first, second = _halves("geglu", gate, up)
    return F.gelu(first) * second


@eager(_C.geglu_tanh)
def geglu_tanh(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Returns ``gelu_tanh(gate) * up``; shapes and strides as for :func:`swiglu`."""
    first, second = _halves("geglu_tanh", gate, up)
    return F.gelu(first, approximate="tanh") * second


def _halves(op: str, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up as two tensors. Rejects odd sizes, whose unequal halves might broadcast."""
    check_dtype(op, "gate", gate)
    if up is not None:
        if up.dtype not in FLOATING:
            check_same_dtype(op, "up", up, "gate", gate)
        check_shape(op, "up", up, "gate", gate, BROADCAST)
        dtype = torch.promote_types(gate.dtype, up.dtype)
        return gate.to(dtype), up.to(dtype)
    size = gate.shape[-1]
    if size % 2:
        raise RuntimeError(
            f"torchkiln.{op}: gate: got a last dimension of size {size}, expected an even one, "
            "to be split into gate and up"
        )
    return gate.narrow(-1, 0, size // 2), gate.narrow(-1, size // 2, size // 2)
