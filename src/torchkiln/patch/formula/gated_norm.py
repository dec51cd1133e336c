"""RMS norms with a gate as second argument, found by their formula."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor, nn

from torchkiln.ops.gated_norm import gated_rms_norm
from torchkiln.patch.formula import norm
from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import is_close, numbers, random_copy, run


@dataclass(frozen=True)
class GatedNorm(Plan):
    """``gated_rms_norm`` with the weight and the eps of the module."""

    kind = "norm"
    weight: str
    eps: str | float
    """The name of the attribute, or the number."""
    gate_first: bool
    groups: int
    offset: float

    def __str__(self) -> str:
        said = ["gate_first=True"] if self.gate_first else []
        said += [f"groups={self.groups}"] if self.groups > 1 else []
        said += [f"offset={self.offset:g}"] if self.offset else []
        return f"gated_rms_norm({', '.join(said)})" if said else "gated_rms_norm"

    def fits(self, module: nn.Module, *args: Any) -> bool:
        """Whether there are two tensors of the weight's dtype: others promote by module."""
        if len(args) != 2 or not all(isinstance(x, Tensor) for x in args):
            return False
        dtype = getattr(module, self.weight).dtype
        return args[0].shape == args[1].shape and all(x.dtype == dtype for x in args)

    def forward(self, module: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
        """The op with the parameters of the module."""
        return gated_rms_norm(
            x,
            gate,
            x.shape[-1:],
            getattr(module, self.weight),
            getattr(module, self.eps) if isinstance(self.eps, str) else self.eps,
            gate_first=self.gate_first,
            groups=self.groups,
            offset=self.offset,
        )


def groups_of(module: nn.Module, columns: int) -> list[int]:
    """Possible numbers of groups: 1, and by the attributes that divide the columns."""
    sizes = [
        value
        for value in vars(module).values()
        if type(value) is int and 1 < value < columns and columns % value == 0
    ]
    return list(dict.fromkeys([1, *sizes, *(columns // size for size in sizes)]))


def find(module: nn.Module) -> Match | None:
    """The gated norm that a leaf with one weight computes of two tensors."""
    names = norm.vectors_of(module)
    if names is None or len(names) != 1:
        return None
    (weight,) = names
    copy = random_copy(module)
    columns = getattr(copy, weight).shape[0]
    x = norm.inputs(columns)
    gate = 2 * numbers(*x.shape, seed=1)
    result = run(copy, x, gate)
    if not isinstance(result, Tensor) or result.shape != x.shape:
        return None
    for (eps, value), gate_first, groups, offset in product(
        norm.eps_of(module), (True, False), groups_of(module, columns), (0.0, 1.0)
    ):
        plan = GatedNorm(weight, value, gate_first, groups, offset)
        if is_close(result, plan.forward(copy, x, gate)):
            return Match(norm.with_eps(plan, copy, eps, x, gate), copy, (x,), (gate,))
    return None
