"""OPNAME: silu of one half of the last dimension, times the other half."""

from typing import Any

import torch

from . import layers
from ._ops import add_op_namespace_prefix, ops


def OPNAME(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(a) * b`` for the halves ``a, b`` of the last dimension of ``x``."""
    return ops.OPNAME_forward(x.contiguous())


@torch.library.register_fake(add_op_namespace_prefix("OPNAME_forward"))
def _forward_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.register_fake(add_op_namespace_prefix("OPNAME_backward"))
def _backward_fake(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return ops.OPNAME_backward(grad.contiguous(), x)


torch.library.register_autograd(
    add_op_namespace_prefix("OPNAME_forward"), _backward, setup_context=_setup_context
)

__all__ = ["OPNAME", "layers"]
