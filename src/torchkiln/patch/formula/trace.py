"""Copies of a module whose calls are recorded as expressions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchkiln.nn.plain import has_hooks
from torchkiln.patch.formula.layout import Dim, Value
from torchkiln.patch.formula.reads import Reader, Reads, reading
from torchkiln.patch.formula.recorder import Recorder
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.formula.watch import Watch
from torchkiln.patch.probe import numbers, shallow_copy

SIZES = {True: (2, 3, 5), False: (130, 4, 3)}
"""Sizes before the last one, by training. The two differ, so that no formula contains them."""

RANKS = (1, 2, 3, 4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (64, 48)
"""Row widths to try for modules without parameters; parameters determine the width."""


class Situation(NamedTuple):
    """A rank, width, dtype and mode in which a module is called."""

    rank: int
    width: int
    dtype: torch.dtype
    training: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an input in this situation."""
        return (*SIZES[self.training][: self.rank - 1], self.width)


@dataclass(frozen=True)
class Traced:
    """The outcome of recording a call: its expression, and the ops that ran."""

    situation: Situation
    result: Value | None = None
    """None if the result has no expression, or another dtype than the input."""
    numbers: frozenset[float] = frozenset()
    """The constants that are added."""
    ops: frozenset[str] = frozenset()
    reason: str = ""


class Proof(NamedTuple):
    """The calls of a module that are proven to compute a formula."""

    ranks: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    keeps_dtype: bool
    """Whether autocast runs all ops of the module in the given dtype, none in float32."""


WIDENED = frozenset(("pow", "rsqrt", "reciprocal", "exp", "sum", "linalg_vector_norm"))
WIDENED |= {"native_layer_norm", "rms_norm", "_fused_rms_norm", "special_erfc", "softplus"}
"""Ops that autocast may run in float32."""


@dataclass
class Trace:
    """The recorded calls of a module in all situations in which it can be called."""

    reads: Reads
    calls: list[Traced]

    @property
    def numbers(self) -> list[float]:
        """The constants that the calls add, sorted."""
        return sorted(frozenset().union(*(call.numbers for call in self.calls)))

    @property
    def reason(self) -> str:
        """The reason why a call has no expression."""
        return next((call.reason for call in self.calls if call.reason), "")

    def proof(
        self, formula: Callable[[Situation], Value | None], dtype: torch.dtype
    ) -> Proof | None:
        """The ranks and dtypes in which all calls compute a formula; None if none in ``dtype``."""
        right: dict[tuple[int, torch.dtype], bool] = {}
        for call in self.calls:
            key = call.situation.rank, call.situation.dtype
            plain = call.situation._replace(dtype=torch.float64, training=False)
            is_same = call.result is not None and call.result == formula(plain)
            right[key] = right.get(key, True) and is_same
        ranks = tuple(r for r in RANKS if right.get((r, dtype)))
        dtypes = tuple(d for d in DTYPES if all(right.get((r, d)) for r in ranks))
        ops = frozenset[str]().union(*(call.ops for call in self.calls))
        return Proof(ranks, dtypes, not ops & WIDENED) if ranks else None


class Copy(NamedTuple):
    """A copied module whose calls are recorded."""

    module: nn.Module
    parameters: dict[str, Tensor]


def input_dims(recorder: Recorder, situation: Situation) -> tuple[Dim, ...]:
    """The axes of an input: a number for each dimension, and ``c`` for the last one."""
    names = [*map(str, range(situation.rank - 1)), "c"]
    sizes = zip(names, situation.shape, strict=True)
    return tuple(recorder.axes.add(name, size) for name, size in sizes)


def add_parameters(recorder: Recorder, parameters: dict[str, Tensor], width: int) -> None:
    """Record parameters of shape ``(width,)`` as inputs; other parameters have no formula."""
    for name, parameter in parameters.items():
        if parameter.shape == (width,):
            recorder.add(parameter, name, [("c",)])


def copied(module: nn.Module, reader: Reader, dtype: torch.dtype, stub: Stub | None) -> Copy:
    """A copy that reports its reads, with random parameters and copies of its submodules.

    ``stub`` returns the substitute of a submodule, or None.
    """
    parameters: dict[str, Tensor] = {}

    def made(original: nn.Module, prefix: tuple[str, ...]) -> nn.Module:
        copy = shallow_copy(original)
        for name in original._modules:
            child = original._modules[name]
            if child is None:
                continue
            path = (*prefix, name)
            taken = stub(".".join(path), child) if stub else None
            if taken is None:
                if has_hooks(child) or "forward" in vars(child):
                    raise NoFormulaError(f"its submodule {'.'.join(path)} has hooks")
                reader.parts[".".join(path)] = type(child)
            copy._modules[name] = taken or made(child, path)
        for seed, (name, parameter) in enumerate(original._parameters.items()):
            if parameter is None:
                continue
            if prefix or parameter.dim() != 1:
                raise NoFormulaError("no op of torchkiln")
            random = nn.Parameter(numbers(*parameter.shape, seed=seed + 1).to(dtype))
            copy._parameters[name] = parameters[name] = random
        if any(buffer is not None for buffer in original._buffers.values()):
            raise NoFormulaError("it has buffers")
        object.__setattr__(copy, "__class__", reading(type(original), reader, prefix))
        return copy

    copy = made(module, ())
    return Copy(copy, parameters)


Stub = Callable[[str, nn.Module], nn.Module | None]


def situations(widths: Sequence[int]) -> Iterator[Situation]:
    """All situations in which a module is recorded."""
    for values in itertools.product(RANKS, widths, DTYPES, (True, False)):
        yield Situation(*values)


class Tracer:
    """Records the calls of one module in all situations."""

    def __init__(
        self,
        module: nn.Module,
        widths: Sequence[int],
        inputs: Sequence[str],
        *,
        overwrites: bool = False,
    ) -> None:
        self.module = module
        self.widths = widths
        self.inputs = inputs
        self.overwrites = overwrites
        """Whether the module may change its arguments."""
        self.reader = Reader()
        self.watch = Watch()

    def stub(self, recorder: Recorder, situation: Situation) -> Stub | None:  # noqa: ARG002
        """A function that returns the substitute of a submodule; None for no substitutes."""
        return None

    def trace(self) -> Trace:
        """The recorded calls; raises :class:`NoFormulaError` for effects and untried branches."""
        calls: list[Traced] = []
        with torch.random.fork_rng([]):
            for situation in situations(self.widths):
                try:
                    calls.append(self.call(situation))
                except NoFormulaError as error:
                    if self.watch.reason:
                        raise
                    calls.append(Traced(situation, reason=str(error)))
                except Exception:  # the module does not take such an input
                    calls.append(Traced(situation))
        self.watch.check()
        self.reader.note_globals(self.watch.globals)
        return Trace(self.reader.reads(), calls)

    def call(self, situation: Situation) -> Traced:
        """Record one call of the module."""
        recorder = Recorder([situation.dtype])
        stub = self.stub(recorder, situation)
        module, parameters = copied(self.module, self.reader, situation.dtype, stub)
        for part in module.modules():
            part.__dict__["training"] = situation.training
        dims = input_dims(recorder, situation)
        add_parameters(recorder, parameters, situation.width)
        self.given = [
            self.made(recorder, name, dims, numbers(*situation.shape, seed=seed), situation.dtype)
            for seed, name in enumerate(self.inputs)
        ]
        with torch.enable_grad(), recorder, self.watch:
            result = type(self.module).forward(module, *self.given)
        return self.traced(recorder, situation, result)

    def made(
        self, recorder: Recorder, name: str, dims: Sequence[Dim], x: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """A recorded input that requires a gradient."""
        x = x.to(dtype).requires_grad_()
        x = x.clone() if self.overwrites else x
        return recorder.add(x, name, dims, overwrites=self.overwrites)

    def traced(self, recorder: Recorder, situation: Situation, result: Any) -> Traced:
        """The outcome of a call; the result must be a tensor of the input's dtype."""
        if not isinstance(result, Tensor):
            raise NoFormulaError("its result is no tensor")
        value = recorder.value(result)
        if not result.requires_grad and value.expression.constant is None:
            raise NoFormulaError("its result has no gradient")
        if not result.is_contiguous():
            raise NoFormulaError("its result has other strides than its argument")
        if result.dtype != situation.dtype:
            raise NoFormulaError("its result has another dtype")
        return Traced(situation, value, frozenset(recorder.numbers), frozenset(recorder.names))


def recorded(
    function: Callable[..., Tensor],
    situation: Situation,
    inputs: Sequence[str],
    parameters: Sequence[str],
) -> Value:
    """The expression of a function of inputs and parameter vectors."""
    recorder = Recorder([torch.float64])
    dims = input_dims(recorder, situation)
    rows = [recorder.add(torch.ones(situation.shape, dtype=torch.float64), n, dims) for n in inputs]
    vectors = [
        recorder.add(torch.ones(situation.width, dtype=torch.float64), name, [("c",)])
        for name in parameters
    ]
    with torch.enable_grad(), recorder:
        return recorder.value(function(*rows, *vectors))
