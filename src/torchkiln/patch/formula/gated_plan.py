"""The forward of gated linear units between their projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from torchkiln.nn.plain import attribute, has_hooks
from torchkiln.ops._folding import PLAIN, is_transformed
from torchkiln.ops.gated import geglu, swiglu
from torchkiln.ops.quantize import Quantized
from torchkiln.patch.formula.linear import WideLinear
from torchkiln.patch.formula.proven import ProvenPlan, is_ordered
from torchkiln.patch.fp8 import gated_in_fp8, is_in_fp8, is_quantizable, take_pair
from torchkiln.patch.plan import plan_of
from torchkiln.patch.recompute import Recomputed, Saved, saved
from torchkiln.patch.source.shared import shared
from torchkiln.typing import Gate

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": lambda gate, up: geglu(gate, up, "tanh"),
}
ACTS: dict[str, Gate] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""The activation of the gate in each op."""


@dataclass(frozen=True)
class Gated(ProvenPlan):
    """``down(act(gate(x)) * up(x))`` by calls of the submodules, which may be of any class.

    Without ``up``, the halves of ``gate(x)`` are the gate and the other factor. With ``swapped``
    the second half is the gate, or ``up`` is called before ``gate``.
    """

    kind = "glu"
    saved_as = "glu"
    op: str
    gate: str
    up: str | None
    down: str
    swapped: bool
    before: tuple[str, ...]
    """Dropouts between the product and ``down``."""
    after: tuple[str, ...]
    """Dropouts after ``down``."""
    reads_weights: bool = False
    """Whether the module reads the dtype of the projections' weights."""
    recompute: bool = False
    """Whether ``down`` saves no input: backward computes it again from the gate and up."""

    def __str__(self) -> str:
        return f"{self.op} between the projections" + ", again in backward" * self.recompute

    def fits(self, module: Any, *args: Any) -> bool:
        """Whether the formula is proven for this call."""
        if len(args) == 1 and type(args[0]) is Quantized:
            return True
        if len(args) != 1 or not self.takes(module, *args):
            return False
        if not self.reads_weights:
            return True
        dtype = args[0].dtype
        for name in (self.gate, self.up, self.down):
            if name is not None:
                part = submodule(module, name)
                weight = part._parameters.get("weight") if isinstance(part, nn.Module) else None
                if weight is None or weight.dtype is not dtype:
                    return False
        return True

    def light(self) -> Gated:
        """The plan whose ``down`` saves no input."""
        return replace(self, recompute=True)

    def takes_quantized(self, module: Any, x: Tensor, place: int | str | None) -> bool:
        """Whether the gate of a proven call is written in FP8."""
        return place is None and self.fits(module, x) and self.is_in_fp8(module, x)

    def is_in_fp8(self, module: Any, x: Any) -> bool:
        """Whether all products are in FP8, and no dropout is between them."""
        if not is_in_fp8(submodule(module, self.down)):  # a quick answer for most modules
            return False
        layers = [submodule(module, name) for name in (self.gate, self.up, self.down) if name]
        if not is_quantizable(x) or not all(map(is_in_fp8, layers)):
            return False
        dropouts = (submodule(module, name) for name in self.before)
        return all(map(is_idle, dropouts)) and take_pair(*layers, x=x)

    def forward(self, module: Any, x: Tensor | Quantized) -> Tensor:
        """The calls of the submodules in their order, with the op between them."""
        if isinstance(x, Quantized) or self.is_in_fp8(module, x):
            h: Any = self.hidden_in_fp8(module, x)
            steps: tuple[str, ...] = (self.down, *self.after)
        else:
            gate, up = self.factors(module, x)
            h, steps = product(self.op, gate, up), (*self.before, self.down, *self.after)
            if self.recompute and self.is_recomputed(module, gate, up, h):
                with Recomputed(h, Product(self.op, saved(gate), saved(up))).hooks():
                    h = submodule(module, self.down)(h)
                steps = self.after
        for name in steps:
            h = submodule(module, name)(h)
        result: Tensor = h
        return result

    def hidden_in_fp8(self, module: Any, x: Tensor | Quantized) -> Quantized:
        """The input of ``down``: the result of the gated unit, in float8_e4m3fn."""
        gate, act = submodule(module, self.gate), ACTS[self.op]
        if self.up is not None:
            return gated_in_fp8(act, x, gate, submodule(module, self.up))
        return gated_in_fp8(act, x, gate, swapped=self.swapped)

    def factors(self, module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gate and the other factor."""
        if self.up is None:
            (both,) = shared(x, submodule(module, self.gate))
            gate, up = both.chunk(2, -1)
        else:
            first, second = submodule(module, self.gate), submodule(module, self.up)
            gate, up = shared(x, second, first) if self.swapped else shared(x, first, second)
        return (up, gate) if self.swapped else (gate, up)

    def is_recomputed(self, module: Any, gate: Tensor, up: Tensor, h: Tensor) -> bool:
        """Whether backward can compute ``h``, the input of ``down``, again."""
        tensors = (gate, up, h)
        return (
            not is_compiling()
            and h.requires_grad
            and is_taken(gate, up)
            and h.dtype is gate.dtype
            and not is_transformed()
            and all(type(one) in PLAIN for one in tensors)
            and all(is_idle(submodule(module, name)) for name in self.before)
            and saves_its_input(submodule(module, self.down))
        )


def saves_its_input(down: Any) -> bool:
    """Whether a layer is torch's linear layer, or one with our forward, and nothing else.

    Other code that saves a parameter would get back its values only, because of our hooks for saved
    tensors.
    """
    is_own = type(down) is nn.Linear or isinstance(plan_of(down), WideLinear)
    is_plain = is_own and "forward" not in vars(down) and not has_hooks(down)
    return is_plain and type(attribute(down, "weight")) in PLAIN


def is_idle(dropout: Any) -> bool:
    """Whether a call of a dropout returns its argument."""
    is_plain = type(dropout) is nn.Dropout and not has_hooks(dropout)
    return is_plain and not (dropout.training and dropout.p)


def submodule(module: nn.Module, name: str) -> Any:
    """The submodule with a name."""
    return module.get_submodule(name) if "." in name else attribute(module, name)


@dataclass(frozen=True)
class Product:
    """The saved factors of a gated unit."""

    op: str
    gate: Saved
    up: Saved

    def result(self) -> Tensor:
        """Their product, with the same bits as in forward."""
        with torch.no_grad():
            return OPS[self.op](self.gate.result(), self.up.result())


def is_taken(gate: Tensor, up: Tensor) -> bool:
    """Whether the op takes the results of the projections."""
    is_alike = gate.dtype is up.dtype and gate.shape == up.shape
    return is_alike and is_ordered(gate) and is_ordered(up)


def product(op: str, gate: Tensor, up: Tensor) -> Tensor:
    """The op, if it takes the results of the projections; otherwise the formula in torch."""
    if is_taken(gate, up):
        return OPS[op](gate, up)
    if op == "swiglu":
        return nn.functional.silu(gate) * up
    return nn.functional.gelu(gate, approximate="tanh" if op == "geglu_tanh" else "none") * up
