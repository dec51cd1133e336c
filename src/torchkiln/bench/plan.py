"""What a run measures, in the order in which it does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from torchkiln.bench.bench_case import BACKWARD, FORWARD, cases
from torchkiln.bench.host import SHAPE as HOST_SHAPE
from torchkiln.bench.host import time_host
from torchkiln.bench.measure import Settings, time_case
from torchkiln.bench.pace import Pace
from torchkiln.bench.peers import EAGER, knows
from torchkiln.bench.row import Row
from torchkiln.bench.skipped import Skipped, reason_of
from torchkiln.bench.small import SHAPES, time_small
from torchkiln.bench.sweep import sweep_shapes
from torchkiln.testing import OpSpec

Shape = tuple[int, int]

CALLS, SWEEP, SMALL, HOST = "calls", "sweep", "small", "host"
NO_TIME = "no time is left of what --within gives"
DTYPES = (torch.float32, torch.bfloat16)


def default_shape(device: torch.device) -> Shape:
    """Enough elements that no cache holds them."""
    return (16384, 8192) if device.type == "cuda" else (4096, 4096)


def shapes_of(spec: OpSpec, device: torch.device) -> tuple[Shape, ...]:
    """Those that the op names, which are chosen for GPUs, or else the default."""
    named = spec.bench_shapes if device.type == "cuda" else ()
    return named or (default_shape(device),)


@dataclass(frozen=True)
class Plan:
    """The choices of a run."""

    specs: tuple[OpSpec, ...]
    device: torch.device
    settings: Settings
    shapes: tuple[Shape, ...] = ()
    """Of single large calls; none where each op is to choose."""
    dtypes: tuple[torch.dtype, ...] = DTYPES
    kinds: tuple[str, ...] = (CALLS,)
    directions: tuple[str, ...] = (FORWARD, BACKWARD)
    threads: tuple[int | None, ...] = (None,)
    """Of the CPU; ``(None,)`` on a GPU."""
    within: float | None = None
    """Seconds for the whole, where there is a limit."""
    is_report: bool = False
    """Whether all but large calls are measured in one dtype, and sweeps of those ops alone to which
    the length of a row means something."""

    def pieces(self) -> list[tuple[str, Iterator[Row | Skipped]]]:
        """What is to be done, in words, and the rows that come of it when it is gone through."""
        pace = Pace(self.within, sum(self._count(kind, spec) for kind, spec, _ in self._each()))
        return [
            (f"{spec.name} {name_of(dtype)}, {kind}", self._rows(pace, kind, spec, dtype))
            for kind, spec, dtype in self._each()
        ]

    def _each(self) -> Iterator[tuple[str, OpSpec, torch.dtype]]:
        for kind in self.kinds:
            for spec in self.specs:
                if kind == SWEEP and self.is_report and not spec.bench_shapes:
                    continue  # the length of a row means nothing to it
                wanted = [dtype for dtype in self.dtypes if dtype in spec.dtypes]
                short = kind != CALLS and self.is_report
                yield from ((kind, spec, dtype) for dtype in (wanted[-1:] if short else wanted))

    def _directions(self, spec: OpSpec) -> list[str]:
        return [d for d in self.directions if d == FORWARD or spec.differentiable]

    def _shapes(self, kind: str, spec: OpSpec) -> Sequence[Shape]:
        if kind == HOST:
            return (HOST_SHAPE,)
        if kind == SWEEP:
            return sweep_shapes(math.prod(default_shape(self.device)))
        if kind == SMALL:
            return spec.small_shapes or SHAPES
        return self.shapes or shapes_of(spec, self.device)

    def _count(self, kind: str, spec: OpSpec) -> int:
        """About how many rows a piece has: those of other strides are not known before."""
        if kind == HOST:
            return 1
        return len(self._shapes(kind, spec)) * len(self._directions(spec)) * len(self.threads)

    def _rows(
        self, pace: Pace, kind: str, spec: OpSpec, dtype: torch.dtype
    ) -> Iterator[Row | Skipped]:
        shapes = self._shapes(kind, spec)
        pace.begin(self._count(kind, spec))
        others = tuple(name for name in self.settings.peers if knows(name, spec.name))
        if kind == SWEEP and self.is_report:  # the peers of the same ops are there in other rows
            others = (EAGER,)
        usual = replace(self.settings, peers=others)
        for shape in shapes:
            is_first = shape == shapes[0] and kind == CALLS and dtype == self.dtypes[-1]
            turn = Turn(kind, spec, dtype, shape, is_first)
            if pace.is_over():
                yield turn.skipped(None, NO_TIME)
                continue
            for work in guarded(turn, None, self._work(turn)):
                if isinstance(work, Skipped):
                    yield work
                    continue
                direction, measure = work
                if pace.is_over():
                    yield turn.skipped(direction, NO_TIME)
                    continue
                chosen = pace.settings(usual, first=is_first)
                start = time.perf_counter()
                yield from guarded(turn, direction, measure(chosen))
                pace.took(time.perf_counter() - start, chosen)

    def _work(self, turn: Turn) -> Iterator[tuple[str | None, Callable[[Settings], Iterator[Row]]]]:
        """Directions and what measures them, one call at a time in memory."""
        kind, spec, dtype, shape = turn.kind, turn.spec, turn.dtype, turn.shape
        if kind == HOST:
            yield None, lambda s: time_host(spec, self.device, dtype, s.peers, left_out=s.left_out)
            return
        if kind == SMALL:
            for d in self._directions(spec):
                yield (
                    d,
                    partial(some, time_small, spec, self.device, dtype, shape=shape, direction=d),
                )
            return
        found = cases(spec, self.device, dtype, shape)
        for case in [next(found)] if kind == SWEEP else found:
            for direction in self._directions(spec):
                for count in self.threads if kind == CALLS else self.threads[:1]:
                    yield (
                        direction,
                        partial(some, time_case, case, direction, count=count, kind=kind),
                    )


@dataclass(frozen=True)
class Turn:
    """What is measured together."""

    kind: str
    spec: OpSpec
    dtype: torch.dtype
    shape: Shape
    is_first: bool

    def skipped(self, direction: str | None, reason: str) -> Skipped:
        """It is not."""
        name = name_of(self.dtype)
        return Skipped(self.kind, self.spec.name, name, self.shape, direction, reason)


def name_of(dtype: torch.dtype) -> str:
    """Without torch."""
    return str(dtype).removeprefix("torch.")


def some(function: Callable[..., Row | None], *given: Any, **named: Any) -> Iterator[Row]:
    """The one row, if there is one."""
    row = function(*given, **named)
    if row is not None:
        yield row


def guarded(turn: Turn, direction: str | None, found: Iterator[Any]) -> Iterator[Any]:
    """What ``found`` yields; where a call cannot be made here, that it was skipped."""
    try:
        yield from found
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        yield turn.skipped(direction, reason)
    if turn.kind != HOST and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
