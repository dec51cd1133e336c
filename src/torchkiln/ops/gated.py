"""Gated linear units: an activation of one half times the other, in one pass over memory."""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.overrides import has_torch_function_variadic

from torchkiln import _C
from torchkiln.ops.activation import is_tanh


def _halves(gate: Tensor, up: Tensor | None, op: str) -> tuple[Tensor, Tensor]:
    """Gate and up in a graph, where what does not divide must not broadcast."""
    if up is not None:
        return gate, up
    size = gate.shape[-1]
    if size % 2:
        raise RuntimeError(
            f"torchkiln.{op}: gate: got a last dimension of size {size}, expected an even one, "
            "to be split into gate and up"
        )
    return gate.narrow(-1, 0, size // 2), gate.narrow(-1, size // 2, size // 2)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Returns ``silu(gate) * up``, contiguous, where ``silu(x)`` is ``x / (1 + exp(-x))``.

    Args:
        gate: any shape, or ``[..., 2 * columns]`` without ``up``: its last dimension is then split
            in two, and the result is ``[..., columns]``. float32, float64, float16 or bfloat16; a
            half precision is computed in float32 and rounded once.
        up: of the shape and dtype of ``gate``.
    """
    if is_compiling():
        first, second = _halves(gate, up, "swiglu")
        return F.silu(first) * second
    if has_torch_function_variadic(gate, up):
        seen: Tensor = torch.ops.torchkiln.swiglu.default(gate, up)
        return seen
    return _C.swiglu(gate, up)


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Returns ``gelu(gate) * up``, contiguous.

    Args:
        gate: as for :func:`swiglu`.
        up: as for :func:`swiglu`.
        approximate: ``"none"``, or ``"tanh"`` for :func:`geglu_tanh`.
    """
    if is_tanh(approximate, "geglu"):
        return geglu_tanh(gate, up)
    if is_compiling():
        first, second = _halves(gate, up, "geglu")
        return F.gelu(first) * second
    if has_torch_function_variadic(gate, up):
        seen: Tensor = torch.ops.torchkiln.geglu.default(gate, up)
        return seen
    return _C.geglu(gate, up)


def geglu_tanh(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Returns ``gelu_tanh(gate) * up``, contiguous; shapes as for :func:`swiglu`."""
    if is_compiling():
        first, second = _halves(gate, up, "geglu_tanh")
        return F.gelu(first, approximate="tanh") * second
    if has_torch_function_variadic(gate, up):
        seen: Tensor = torch.ops.torchkiln.geglu_tanh.default(gate, up)
        return seen
    return _C.geglu_tanh(gate, up)
