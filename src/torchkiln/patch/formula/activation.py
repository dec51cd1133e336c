"""Activations without parameters, found by their formula."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchkiln.ops.activation import ACTIVATIONS
from torchkiln.patch.formula.layout import Value
from torchkiln.patch.formula.proven import ProvenPlan
from torchkiln.patch.formula.reads import MACHINERY, is_plain
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.formula.trace import WIDTHS, Proof, Situation, Trace, Tracer, recorded
from torchkiln.patch.plan import Match
from torchkiln.patch.probe import shallow_copy
from torchkiln.patch.table import stays

OPS = {name: op for name, op in ACTIVATIONS.items() if name != "square"}

EQUAL = {"relu", "silu", "sigmoid", "tanh"}
"""Ops for which torch has one kernel of the same speed."""


@dataclass(frozen=True)
class Activation(ProvenPlan):
    """The plan of one elementwise op."""

    kind = "activation"
    saved_as = "activation"
    op: str

    def __str__(self) -> str:
        return self.op

    def fits(self, module: nn.Module, *args: object) -> bool:
        """Whether the formula is proven for this call."""
        return len(args) == 1 and self.takes(module, *args)

    def stays(self, *args: Any) -> bool:
        """Whether ``torch.compile`` uses the op: yes, unless it was measured to be slower."""
        return stays(self.op, *args)

    def forward(self, _: nn.Module, x: Tensor) -> Tensor:
        """The result of the op."""
        return OPS[self.op](x)


def grid() -> Tensor:
    """Inputs from -12 to 12, in float64."""
    return torch.linspace(-12, 12, 4097, dtype=torch.float64)


class Computed(NamedTuple):
    """An activation that a module computes."""

    name: str
    proof: Proof
    trace: Trace


@lru_cache(maxsize=512)
def formula(name: str, situation: Situation) -> Value | None:
    """The formula of an activation, from its spec; None if the spec calls an unsupported op."""
    from torchkiln.testing.specs.activation import FORMULAS  # noqa: PLC0415

    try:
        return recorded(FORMULAS[name].exact, situation, ["x"], [])
    except NoFormulaError:
        return None


def computed(module: nn.Module, *, overwrites: bool = False) -> Computed | str:
    """The activation that a leaf without parameters computes, or the reason if it computes none.

    ``overwrites`` is whether the leaf may change its argument.
    """
    if any(True for _ in module.children()) or any(True for _ in module.parameters()):
        return ""
    try:
        trace = Tracer(module, WIDTHS, ["x"], overwrites=overwrites).trace()
    except NoFormulaError as error:
        return str(error)
    for name in OPS:
        proof = trace.proof(partial(formula, name), torch.float32)
        if proof is not None:
            return Computed(name, proof, trace)
    return trace.reason


def computed_in_place(module: nn.Module) -> Computed | str:
    """:func:`computed` of a leaf that may change its argument.

    It is found once for all modules of a class of torch with equal attributes.
    """
    cls: Any = type(module)
    own = [(name, value) for name, value in vars(module).items() if name not in MACHINERY]
    is_torchs = cls.__module__.startswith("torch.nn.modules") and is_plain(tuple(own))
    if not is_torchs or any(vars(module)[name] for name in ("_parameters", "_buffers", "_modules")):
        return computed(module, overwrites=True)
    return of_torchs(cls, cls.forward, tuple((name, type(value), value) for name, value in own))


@lru_cache(maxsize=256)
def of_torchs(
    cls: type[nn.Module],
    _: object,  # the class's forward, a cache key: it may be replaced
    values: tuple[tuple[str, type, Any], ...],
) -> Computed | str:
    """The activation that a module of torch with these attributes computes."""
    module = object.__new__(cls)
    nn.Module.__init__(module)
    vars(module).update({name: value for name, _, value in values})
    return computed(module, overwrites=True)


def find(module: nn.Module, dtype: torch.dtype) -> Match | str | None:
    """The plan for an activation, or the reason if the module runs one equally fast kernel."""
    found = computed(module)
    if isinstance(found, str) or dtype not in found.proof.dtypes:
        return found if isinstance(found, str) else None
    ops = frozenset().union(*(call.ops for call in found.trace.calls)) - {"detach"}
    if len(ops) == 1 and found.name in EQUAL:
        return f"torch's {found.name} is one kernel of the same speed"
    plan = Activation(found.name, proof=found.proof, reads=found.trace.reads)
    return Match(plan, shallow_copy(module), (grid(),))
