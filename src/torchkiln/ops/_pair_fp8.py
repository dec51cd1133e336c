"""Two products in float8_e4m3fn, with an activation or a gate between them."""

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchkiln.ops.activation import ACTIVATIONS
from torchkiln.ops.gated import geglu, geglu_tanh, swiglu
from torchkiln.ops.quantize import Quantized
from torchkiln.typing import Activation, Gate, Precision, Saved

Operand = Tensor | Quantized
Product = Callable[[Operand], Tensor]

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": geglu_tanh,
}


def check(op: str, precision: str, act: str, save: str) -> None:
    """Refuses words that the op does not take."""
    words = {"precision": (precision, Precision), "save": (save, Saved)}
    words["act"] = (act, Activation if op == "mlp" else Gate)
    for name, (got, expected) in words.items():
        if got not in get_args(expected):
            raise RuntimeError(
                f"torchkiln.{op}: {name}: got {got!r}, expected one of "
                f"{', '.join(get_args(expected))}"
            )


def gated(act: str, both: Tensor) -> Operand:
    """The gated unit of a packed gate, as the operand of a product.

    The product quantises a plain tensor in both orientations, in one read.
    """
    return GATES[act](both)


def activated(act: str, x: Tensor) -> Operand:
    """The activation, as the operand of a product."""
    return x if act == "none" else ACTIVATIONS[act](x)


def pair(
    first: Product, between: Callable[[Tensor], Operand], down: Product, x: Operand, save: Saved
) -> Tensor:
    """``down(between(first(x)))``; with ``save="none"`` backward computes ``first(x)`` again."""

    def hidden() -> Operand:
        return between(first(x))

    if save == "none" and torch.is_grad_enabled():
        kept: Operand = checkpoint(hidden, use_reentrant=False, preserve_rng_state=False)
        return down(kept)
    return down(hidden())
