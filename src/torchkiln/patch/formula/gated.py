"""Gated linear units between the projections of a module, found by recording its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchkiln.nn.plain import attribute, has_hooks
from torchkiln.ops.gated import geglu, swiglu
from torchkiln.ops.quantize import Quantized
from torchkiln.patch.formula.layout import Value
from torchkiln.patch.formula.proven import ProvenPlan, is_ordered
from torchkiln.patch.formula.recorder import Recorder
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.formula.trace import WIDTHS, Situation, Stub, Traced, Tracer
from torchkiln.patch.fp8 import gated_in_fp8, is_in_fp8, is_quantizable, take_pair
from torchkiln.patch.plan import Match
from torchkiln.patch.probe import first_dtype, numbers, shallow_copy
from torchkiln.patch.source.shared import shared
from torchkiln.typing import Gate

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": lambda gate, up: geglu(gate, up, "tanh"),
}
ACTS: dict[str, Gate] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""The activation of the gate in each op."""

HIDDEN = 24
"""Width between the projections of a recorded call."""


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

    def __str__(self) -> str:
        return f"{self.op} between the projections"

    def fits(self, module: Any, *args: Any) -> bool:
        """Whether the formula is proven for this call."""
        if len(args) == 1 and type(args[0]) is Quantized:
            return True
        if len(args) != 1 or not self.takes(module, *args):
            return False
        if not self.reads_weights:
            return True
        layers = map(module.get_submodule, filter(None, (self.gate, self.up, self.down)))
        return all(getattr(layer.weight, "dtype", None) is args[0].dtype for layer in layers)

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
            h, steps = self.hidden(module, x), (*self.before, self.down, *self.after)
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

    def hidden(self, module: Any, x: Tensor) -> Tensor:
        """The result of the gated unit, before dropouts and ``down``."""
        if self.up is None:
            (both,) = shared(x, submodule(module, self.gate))
            gate, up = both.chunk(2, -1)
        else:
            first, second = submodule(module, self.gate), submodule(module, self.up)
            gate, up = shared(x, second, first) if self.swapped else shared(x, first, second)
        if self.swapped:
            gate, up = up, gate
        return product(self.op, gate, up)


def is_idle(dropout: Any) -> bool:
    """Whether a call of a dropout returns its argument."""
    is_plain = type(dropout) is nn.Dropout and not has_hooks(dropout)
    return is_plain and not (dropout.training and dropout.p)


def submodule(module: nn.Module, name: str) -> Any:
    """The submodule with a name."""
    return module.get_submodule(name) if "." in name else attribute(module, name)


def product(op: str, gate: Tensor, up: Tensor) -> Tensor:
    """The op, if it takes the results of the projections; otherwise the formula in torch."""
    if gate.dtype is up.dtype and gate.shape == up.shape and is_ordered(gate) and is_ordered(up):
        return OPS[op](gate, up)
    if op == "swiglu":
        return nn.functional.silu(gate) * up
    return nn.functional.gelu(gate, approximate="tanh" if op == "geglu_tanh" else "none") * up


class Call(NamedTuple):
    """A recorded call of a submodule."""

    name: str
    given: Tensor
    result: Tensor
    is_dropout: bool


class Weight:
    """A tensor of which only the dtype is known."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return Tensor

    def __getattr__(self, name: str) -> Any:
        raise NoFormulaError(f"it reads {name} of a weight")


class Opaque(nn.Module):
    """Takes the place of a submodule: its result is an input of the recorded call."""

    tracer: GatedTracer
    _kiln_read = True

    def __init__(self, tracer: GatedTracer, name: str, *, is_dropout: bool) -> None:
        super().__init__()
        self.tracer, self.name, self.is_dropout = tracer, name, is_dropout

    @property
    def weight(self) -> Weight:
        """A stand-in for a weight whose dtype is read. The plan then requires the input's dtype."""
        self.tracer.reads_weights = True
        return Weight(self.tracer.situation.dtype)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Refuses ``isinstance``, which would need the class of the submodule."""
        raise NoFormulaError("it looks at the class of a submodule")

    def __getattr__(self, name: str) -> Any:
        raise NoFormulaError(f"it reads {name} of a submodule")

    def forward(self, x: Tensor) -> Tensor:
        """The result, whose shape differs from that of the argument in the last size only."""
        return self.tracer.called(self.name, x, self.is_dropout)


class Roles(NamedTuple):
    """The submodules in the order of their calls."""

    first: tuple[str, ...]
    before: tuple[str, ...]
    down: str
    after: tuple[str, ...]


class GatedTracer(Tracer):
    """Records a module in which submodules with parameters or buffers, and dropouts, are opaque."""

    def __init__(self, module: nn.Module, packed: bool) -> None:
        super().__init__(module, WIDTHS, ["x"])
        self.packed = packed
        self.roles: Roles | None = None
        self.is_likely = False
        """Whether a projection was called with the input, as in a gated unit."""
        self.reads_weights = False

    def stub(self, recorder: Recorder, situation: Situation) -> Stub:
        """A function that returns the substitute of a submodule."""
        self.recorder, self.situation = recorder, situation
        self.calls: list[Call] = []

        def stub(name: str, child: nn.Module) -> nn.Module | None:
            is_dropout = type(child) is nn.Dropout and not has_hooks(child)
            if not is_dropout and not has_state(child):
                return None
            return Opaque(self, name, is_dropout=is_dropout and "forward" not in vars(child))

        return stub

    def called(self, name: str, x: Any, is_dropout: bool) -> Tensor:
        """The result of an opaque call."""
        value = self.recorder.value(x)
        is_first = x is self.given[0] and not is_dropout
        width = HIDDEN * (1 + self.packed) if is_first else self.situation.width
        with self.recorder.paused():
            size = x.shape[-1] if is_dropout else width
            result = numbers(*x.shape[:-1], size, seed=len(self.calls) + 1).to(x.dtype)
            result.requires_grad_()
        last = value.dims[-1:] if is_dropout else [self.recorder.axes.add(f"of {size}", size)]
        self.recorder.add(result, name, (*value.dims[:-1], *last))
        self.calls.append(Call(name, x, result, is_dropout))
        self.is_likely |= is_first and not self.packed
        return result

    def traced(self, recorder: Recorder, situation: Situation, result: Any) -> Traced:
        """The product before the last projection; refuses calls that no gated unit makes."""
        first = [call for call in self.calls if call.given is self.given[0]]
        rest = self.calls[len(first) :]
        is_chained = all(one.result is other.given for one, other in pairwise(rest))
        down = [call for call in rest if not call.is_dropout]
        names = [call.name for call in self.calls]
        if (
            self.calls[: len(first)] != first
            or len(first) != 2 - self.packed
            or any(call.is_dropout for call in first)
            or len(down) != 1
            or not is_chained
            or rest[-1].result is not result
            or len(set(names)) != len(names)
        ):
            raise NoFormulaError("")
        at = rest.index(down[0])
        steps = [call.name for call in rest]
        roles = Roles(
            tuple(call.name for call in first), tuple(steps[:at]), steps[at], tuple(steps[at + 1 :])
        )
        if self.roles not in (None, roles):
            raise NoFormulaError("it calls its projections in another order")
        self.roles = roles
        return super().traced(recorder, situation, rest[0].given)


def has_state(module: nn.Module) -> bool:
    """Whether a submodule has parameters or buffers."""
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


@lru_cache(maxsize=512)
def formula(op: str, situation: Situation, gate: str, up: str | None, swapped: bool) -> Value:
    """The formula of the product, from the spec of the op."""
    from torchkiln.testing.specs.gated import reference  # noqa: PLC0415

    recorder = Recorder([torch.float64])
    labels = [recorder.axes.add(str(i), n) for i, n in enumerate(situation.shape[:-1])]
    size = HIDDEN * (1 if up else 2)
    last = recorder.axes.add(f"of {size}", size)
    names = [gate] if up is None else [gate, up]
    tensors = [torch.ones(*situation.shape[:-1], size, dtype=torch.float64) for _ in names]
    for name, tensor in zip(names, tensors, strict=True):
        recorder.add(tensor, name, (*labels, last))
    with torch.enable_grad(), recorder:
        parts = tensors if up else list(tensors[0].chunk(2, -1))
        one, other = parts[::-1] if swapped and not up else parts
        return recorder.value(reference(ACTS[op], one, other))


def find(module: nn.Module, dtype: torch.dtype) -> Match | str | None:
    """The gated linear unit that a module with two or three projections computes."""
    children = [child for child in module.children() if has_state(child)]
    if next(module.parameters(recurse=False), None) is not None or not 2 <= len(children) <= 3:
        return None
    tracer = GatedTracer(module, packed=len(children) == 2)
    try:
        trace = tracer.trace()
    except NoFormulaError as error:
        return str(error) or None if tracer.is_likely else None
    roles = tracer.roles
    if roles is None:
        return trace.reason or None if tracer.is_likely else None
    for op in OPS:
        for swapped in (False, True):
            gate, up = roles.first[0], None if tracer.packed else roles.first[1]
            if swapped and up is not None:
                gate, up = up, gate

            def of(situation: Situation, op: str = op, s: Any = (gate, up, swapped)) -> Value:
                return formula(op, situation, *s)

            proof = trace.proof(of, dtype)
            if proof is None:
                continue
            if len({first_dtype(child.parameters()) for child in children}) > 1:
                return "its projections have different dtypes"
            plan = Gated(
                op,
                gate,
                up,
                roles.down,
                swapped,
                roles.before,
                roles.after,
                tracer.reads_weights,
                proof=proof,
                reads=trace.reads,
            )
            return Match(plan, shuffled(module), (numbers(2, 5, WIDTHS[0]),))
    return trace.reason or None


class Shuffle(nn.Module):
    """A shuffle of the columns: exact in every dtype, so that only the gate rounds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The shuffled columns."""
        generator = torch.Generator().manual_seed(self.seed)
        return x[..., torch.randperm(x.shape[-1], generator=generator).to(x.device)]


def shuffled(module: nn.Module) -> nn.Module:
    """A copy whose projections are shuffles, for comparisons of values."""
    copy = shallow_copy(module)
    for seed, (name, child) in enumerate(module.named_children(), 1):
        copy._modules[name] = Shuffle(seed) if has_state(child) else shallow_copy(child)
    return copy
