"""Two products in float8_e4m3fn, with an activation or a gate between them."""

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchkiln.ops.activation import ACTIVATIONS
from torchkiln.ops.quantize import (
    Quantized,
    QuantizedWeight,
    gated_linear_fp8,
    geglu_fp8,
    linear_fp8,
    swiglu_fp8,
)
from torchkiln.typing import Activation, Gate, Precision, Saved

Operand = Tensor | Quantized


def check(op: str, precision: str, act: str, save: str) -> None:
    """Refuses values of ``precision``, ``act`` and ``save`` that the op does not support."""
    words = {"precision": (precision, Precision), "save": (save, Saved)}
    words["act"] = (act, Activation if op == "mlp" else Gate)
    for name, (got, expected) in words.items():
        if got not in get_args(expected):
            raise RuntimeError(
                f"torchkiln.{op}: {name}: got {got!r}, expected one of "
                f"{', '.join(get_args(expected))}"
            )


def gated(
    act: Gate,
    weight: Tensor,
    bias: Tensor | None,
    x: Operand,
    quantized: QuantizedWeight | None = None,
) -> Quantized:
    """The gated unit of a layer, as the operand of a product."""
    if bias is None:
        return gated_linear_fp8(x, weight, act, quantized=quantized)
    return quantized_gate(act, linear_fp8(x, weight, bias, quantized=quantized))


def quantized_gate(act: Gate, gate: Tensor, up: Tensor | None = None) -> Quantized:
    """The gated unit of two tensors, or of the halves of one, in float8_e4m3fn."""
    if act == "silu":
        return swiglu_fp8(gate, up)
    return geglu_fp8(gate, up, approximate="none" if act == "gelu" else "tanh")


def activated(act: str, x: Tensor) -> Tensor:
    """The activation, as an operand that the product quantises."""
    return x if act == "none" else ACTIVATIONS[act](x)


def pair(
    first: Callable[[Operand], Operand], down: Callable[[Operand], Tensor], x: Operand, save: Saved
) -> Tensor:
    """``down(first(x))``; with ``save="none"`` backward computes ``first(x)`` again."""
    if save == "none" and torch.is_grad_enabled():
        kept: Operand = checkpoint(first, x, use_reentrant=False, preserve_rng_state=False)
        return down(kept)
    return down(first(x))
