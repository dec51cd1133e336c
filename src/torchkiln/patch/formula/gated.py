"""Gated linear units between the projections of a module, found by recording its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.ops.gated import geglu, swiglu
from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import cast, first_dtype, is_close, numbers, run, shallow_copy
from torchkiln.patch.source.shared import shared

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": lambda gate, up: geglu(gate, up, "tanh"),
}

WIDTH = 64
"""Features of the input where no projection has ``in_features``."""


@dataclass(frozen=True)
class Gated(Plan):
    """``down(act(gate(x)) * up(x))`` by calls of the submodules, which may be of any class.

    Without ``up``, the two halves of ``gate(x)`` are the gate and the other factor; with
    ``swapped``, the second half is the gate.
    """

    kind = "glu"
    op: str
    gate: str
    up: str | None
    down: str
    swapped: bool
    before: tuple[str, ...]
    """Dropouts between the product and ``down``."""
    after: tuple[str, ...]
    """Dropouts after ``down``."""

    def __str__(self) -> str:
        return f"{self.op} between the projections"

    def fits(self, _: Any, *args: Tensor) -> bool:
        """Whether forward has one argument."""
        return len(args) == 1

    def forward(self, module: Any, x: Tensor) -> Tensor:
        """The calls of the submodules, with the op between them."""
        names = [self.gate] if self.up is None else [self.gate, self.up]
        found = shared(x, *map(module.get_submodule, names))
        gate, up = found if self.up is not None else found[0].chunk(2, -1)
        if self.swapped:
            gate, up = up, gate
        h = OPS[self.op](gate, up)
        for name in (*self.before, self.down, *self.after):
            h = module.get_submodule(name)(h)
        return h


@dataclass
class Call:
    """A recorded call of a submodule."""

    name: str
    given: Tensor
    result: Tensor


class Recorder(nn.Module):
    """Takes the place of a submodule and records its calls."""

    def __init__(self, name: str, calls: list[Call]) -> None:
        super().__init__()
        self.name = name
        self.calls = calls

    def apply_to(self, x: Tensor) -> Tensor:
        """The result of a call."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Record the call."""
        result = self.apply_to(x)
        self.calls.append(Call(self.name, x, result))
        return result


class Projection(Recorder):
    """A shuffle of the columns: exact in every dtype, so that only the gate rounds."""

    def __init__(self, name: str, calls: list[Call], seed: int, source: nn.Module) -> None:
        super().__init__(name, calls)
        self.seed = seed
        self.in_features = getattr(source, "in_features", WIDTH)
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)

    def apply_to(self, x: Tensor) -> Tensor:
        """The shuffled columns."""
        generator = torch.Generator().manual_seed(self.seed)
        return x[..., torch.randperm(x.shape[-1], generator=generator).to(x.device)]


@dataclass
class Recording:
    """A copy of the module whose projections and dropouts are recorders."""

    copy: nn.Module
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> Recording:
        """Children with parameters are projections; others stay, except for dropouts."""
        recording = cls(shallow_copy(module))
        for seed, (name, child) in enumerate(module.named_children(), 1):
            made: nn.Module
            if any(True for _ in child.parameters()):
                made = Projection(name, recording.calls, seed, child)
            elif isinstance(child, nn.Dropout):
                made = Recorder(name, recording.calls)
            else:
                made = shallow_copy(child)
            recording.copy._modules[name] = made
        return recording

    def run(self, x: Tensor, *, training: bool = False) -> Any:
        """The result of a call."""
        self.calls.clear()
        self.copy.training = training
        result = run(self.copy, x)
        self.copy.training = False
        return result


def find(module: nn.Module) -> Match | str | None:
    """The gated linear unit that a module with two or three projections computes."""
    children = list(module.named_children())
    projections = [child for _, child in children if any(True for _ in child.parameters())]
    own = next(module.parameters(recurse=False), None)
    if own is not None or not 2 <= len(projections) <= 3:
        return None
    recording = Recording.of(module)
    width = getattr(projections[0], "in_features", WIDTH)
    x = numbers(2, 5, width if isinstance(width, int) else WIDTH)
    result = recording.run(x)
    if not isinstance(result, Tensor) or len(recording.calls) < len(projections):
        return None
    plan = plan_of(recording.calls, x, result)
    if plan is None:
        return None
    trained = recording.run(x, training=True)
    if not (isinstance(trained, Tensor) and torch.equal(trained, result)):
        return "it computes something else in training, such as a dropout that is no submodule"
    if len({first_dtype(child.parameters()) for child in projections}) > 1:
        return "its projections have different dtypes"
    copy = cast(recording.copy, torch.float64, torch.device("cpu"))
    return Match(plan, copy, (x,)) if is_close(result, plan.forward(copy, x)) else None


def plan_of(calls: Sequence[Call], x: Tensor, result: Tensor) -> Gated | None:
    """The roles of the recorded calls."""
    first = [call for call in calls if torch.equal(call.given, x)]
    names = [call.name for call in calls]
    rest = calls[len(first) :]
    in_order = all(one is other for one, other in zip(calls, first, strict=False))
    if not (1 <= len(first) <= 2 and in_order and rest and len(set(names)) == len(names)):
        return None
    # Dropouts and down follow each other; the last one returns the result.
    chained = all(torch.equal(one.result, other.given) for one, other in pairwise(rest))
    if not (chained and torch.equal(rest[-1].result, result)):
        return None
    steps = [call.name for call in rest]
    down = next((i for i, call in enumerate(rest) if not torch.equal(call.given, call.result)), -1)
    before, after = tuple(steps[:down]), tuple(steps[down + 1 :])
    product = rest[0].given
    packed = len(first) == 1
    halves = first[0].result.chunk(2, -1) if packed else [call.result for call in first]
    if len(halves) < 2:  # a single feature
        return None
    for op, f in OPS.items():
        for swapped in (False, True):
            gate, up = halves[::-1] if swapped else halves
            if gate.shape != up.shape or not is_close(product, f(gate, up)):
                continue
            if packed:
                return Gated(op, first[0].name, None, steps[down], swapped, before, after)
            gate_name, up_name = names[:2][::-1] if swapped else names[:2]
            return Gated(op, gate_name, up_name, steps[down], False, before, after)
    return None
