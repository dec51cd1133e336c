"""RMS norms with a gate as second argument, found by their formula."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.nn.plain import attribute
from torchkiln.ops.gated_norm import gated_rms_norm
from torchkiln.patch.formula import norm
from torchkiln.patch.formula.layout import Value
from torchkiln.patch.formula.proven import ProvenPlan
from torchkiln.patch.formula.trace import Situation, Trace, Tracer, recorded
from torchkiln.patch.plan import Match
from torchkiln.patch.probe import numbers, random_copy


@dataclass(frozen=True)
class GatedNorm(ProvenPlan):
    """``gated_rms_norm`` with the weight and the eps of the module."""

    kind = "norm"
    saved_as = "gated_norm"
    weight: str
    eps: str | float
    """The name of the attribute with eps, or eps itself."""
    gate_first: bool
    groups: int
    offset: float

    def __str__(self) -> str:
        said = ["gate_first=True"] if self.gate_first else []
        said += [f"groups={self.groups}"] if self.groups > 1 else []
        said += [f"offset={self.offset:g}"] if self.offset else []
        return f"gated_rms_norm({', '.join(said)})" if said else "gated_rms_norm"

    def fits(self, module: nn.Module, *args: Any) -> bool:
        """Whether there are two tensors of one shape and of the weight's dtype."""
        if len(args) != 2 or not self.takes(module, *args) or args[0].shape != args[1].shape:
            return False
        return norm.is_vector_of(attribute(module, self.weight), args[0])

    def forward(self, module: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
        """The op with the parameters of the module."""
        return gated_rms_norm(
            x,
            gate,
            x.shape[-1:],
            attribute(module, self.weight),
            attribute(module, self.eps) if isinstance(self.eps, str) else self.eps,
            gate_first=self.gate_first,
            groups=self.groups,
            offset=self.offset,
        )


def groups_of(trace: Trace, columns: int) -> list[int]:
    """Possible numbers of groups: 1, and one for each read number that divides the columns."""
    sizes = [
        value
        for _, value in trace.reads.values
        if type(value) is int and 1 < value < columns and columns % value == 0
    ]
    return list(dict.fromkeys([1, *sizes, *(columns // size for size in sizes)]))


@lru_cache(maxsize=512)
def formula(situation: Situation, weight: str, eps: float, options: tuple[Any, ...]) -> Value:
    """The formula of the norm of two tensors, from the spec of the op."""
    from torchkiln.testing.specs.gated_norm import reference  # noqa: PLC0415

    def norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return reference(x, gate, x.shape[-1:], weight, eps, **dict(options))

    return recorded(norm, situation, ["x", "gate"], [weight])


def find(module: nn.Module, dtype: torch.dtype) -> Match | str | None:
    """The gated norm that a leaf with one weight computes of two tensors."""
    names = norm.vectors_of(module)
    if names is None or len(names) != 1:
        return None
    (weight,) = names
    columns = getattr(module, weight).shape[0]
    tracer = Tracer(module, [columns], ["x", "gate"])
    trace = tracer.trace()
    for (eps, value), gate_first, groups, offset in product(
        list(norm.eps_of(trace)), (True, False), groups_of(trace, columns), (0.0, 1.0)
    ):
        options = (("gate_first", gate_first), ("groups", groups), ("offset", offset))

        def of(eps: float, options: Any = options) -> Any:
            return lambda situation: formula(situation, weight, eps, options)

        proof = trace.proof(of(value), dtype)
        if proof is not None:
            plan = GatedNorm(
                weight, value, gate_first, groups, offset, proof=proof, reads=trace.reads
            )
            x = norm.inputs(columns)
            gate = 2 * numbers(*x.shape, seed=1)
            return Match(norm.with_eps(plan, tracer, eps, of), random_copy(module), (x,), (gate,))
    return trace.reason or None
