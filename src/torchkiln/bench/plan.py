"""The order in which a run measures its rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import torchkiln
from torchkiln.bench.budget import Budget
from torchkiln.bench.case import BACKWARD, FORWARD, STEP, cases
from torchkiln.bench.measure import (
    HOST_SHAPE,
    SMALL_SHAPES,
    Settings,
    time_case,
    time_host,
    time_small,
)
from torchkiln.bench.peers import EAGER, knows
from torchkiln.bench.result import CALLS, HOST, ROWS, SMALL, SWEEP, Measurement, Skipped, reason_of
from torchkiln.cli.status import CannotRun
from torchkiln.ops._traced import name_of
from torchkiln.testing import OpSpec

Shape = tuple[int, int]

NO_TIME = "no time is left of what --within gives"
DTYPES = (torch.float32, torch.bfloat16)

POWERS_OF_TWO = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
MODEL_SIZES = (2880, 3584, 5120, 6656, 11008, 12288, 18944, 28672, 50257, 151936, 262143)
"""Hidden sizes and vocabularies of language models that are no powers of two, and an odd length."""

COLUMNS = 1024
"""The row length of the calls on 1 to 1 M rows."""


def default_device() -> torch.device:
    """The first GPU if there is one and this build has kernels for GPUs, else the CPU."""
    usable = torchkiln.build_info()["cuda"] and torch.cuda.is_available()
    return torch.device("cuda:0" if usable else "cpu")


def device_of(where: str, name: str | None) -> torch.device:
    """The device that ``--device`` names, by default a GPU if one is usable.

    A named GPU becomes torch's current one, whose streams and events the clocks use.
    """
    usable = default_device()
    if name is None or name == "cpu":
        return torch.device(name) if name else usable
    if usable.type == "cpu":
        raise CannotRun(
            f"{where}: --device: got {name}, expected a GPU and a build with kernels for it; "
            "torchkiln.build_info() and torch.cuda.is_available() say which is missing"
        )
    device = torch.device("cuda", torch.device(name).index or 0)
    count = torch.cuda.device_count()
    if device.index >= count:
        raise CannotRun(
            f"{where}: --device: got {name}, expected an index below {count}, the number of GPUs"
        )
    torch.cuda.set_device(device)
    return device


def default_shape(device: torch.device) -> Shape:
    """A shape with more elements than caches hold."""
    return (16384, 8192) if device.type == "cuda" else (4096, 4096)


def shapes_of(spec: OpSpec, device: torch.device) -> tuple[Shape, ...]:
    """The shapes of the spec for GPUs; without these the default shape."""
    named = spec.bench_shapes if device.type == "cuda" else ()
    return named or (default_shape(device),)


def sweep_shapes(elements: int) -> list[Shape]:
    """For each row length, the number of rows with about ``elements`` elements, and the length."""
    lengths = sorted((*POWERS_OF_TWO, *MODEL_SIZES))
    return [(max(1, round(elements / length)), length) for length in lengths]


def row_shapes(elements: int) -> list[Shape]:
    """1 to 1 M rows, by factors of 8, with at most ``8 * elements`` elements."""
    counts = [8**power for power in range(7)] + [2**20]
    return [(rows, COLUMNS) for rows in counts if rows * COLUMNS <= 8 * elements]


@dataclass(frozen=True)
class Plan:
    """The choices of a run: ops, device, dtypes, shapes, peers and limits."""

    specs: tuple[OpSpec, ...]
    device: torch.device
    settings: Settings
    shapes: tuple[Shape, ...] = ()
    """Shapes of single large calls; empty for the shapes of each op."""
    dtypes: tuple[torch.dtype, ...] = DTYPES
    kinds: tuple[str, ...] = (CALLS,)
    directions: tuple[str, ...] = (FORWARD, BACKWARD)
    threads: tuple[int | None, ...] = (None,)
    """CPU threads; ``(None,)`` on a GPU."""
    within: float | None = None
    """Limit for the whole run, in seconds."""
    is_report: bool = False
    """Whether to measure less: only the last dtype for kinds other than large calls, and sweeps
    only for ops with ``bench_shapes``."""

    def pieces(self) -> list[tuple[str, Iterator[Measurement | Skipped]]]:
        """Pairs of a title and its rows, which are measured when they are iterated over."""
        budget = Budget(self.within, sum(self._count(kind, spec) for kind, spec, _ in self._each()))
        return [
            (f"{spec.name} {name_of(dtype)}, {kind}", self._rows(budget, kind, spec, dtype))
            for kind, spec, dtype in self._each()
        ]

    def _each(self) -> Iterator[tuple[str, OpSpec, torch.dtype]]:
        for kind in self.kinds:
            for spec in self.specs:
                if kind in (SWEEP, ROWS) and self.is_report and not spec.bench_shapes:
                    continue  # the time of this op does not depend on the row length
                wanted = [dtype for dtype in self.dtypes if dtype in spec.dtypes]
                short = kind != CALLS and self.is_report
                yield from ((kind, spec, dtype) for dtype in (wanted[-1:] if short else wanted))

    def _directions(self, spec: OpSpec) -> list[str]:
        found = [d for d in self.directions if d == FORWARD or spec.differentiable]
        return [STEP if d == BACKWARD and spec.gradient_in_forward else d for d in found]

    def _shapes(self, kind: str, spec: OpSpec) -> Sequence[Shape]:
        if kind == HOST:
            return (HOST_SHAPE,)
        if kind == SWEEP:
            return sweep_shapes(math.prod(default_shape(self.device)))
        if kind == ROWS:
            return row_shapes(math.prod(default_shape(self.device)))
        if kind == SMALL:
            return spec.small_shapes or SMALL_SHAPES
        return self.shapes or shapes_of(spec, self.device)

    def _count(self, kind: str, spec: OpSpec) -> int:
        """Rows of a piece; an estimate, because the number of variants is not known before."""
        if kind == HOST:
            return 1
        return len(self._shapes(kind, spec)) * len(self._directions(spec)) * len(self.threads)

    def _rows(
        self, budget: Budget, kind: str, spec: OpSpec, dtype: torch.dtype
    ) -> Iterator[Measurement | Skipped]:
        shapes = self._shapes(kind, spec)
        budget.begin(self._count(kind, spec))
        others = tuple(name for name in self.settings.peers if knows(name, spec.name))
        if kind in (SWEEP, ROWS) and self.is_report:  # other peers are timed in CALLS
            others = (EAGER,)
        usual = replace(self.settings, peers=others)
        for shape in shapes:
            is_first = shape == shapes[0] and kind == CALLS and dtype == self.dtypes[-1]
            skip = partial(Skipped, kind, spec.name, name_of(dtype), shape)
            if budget.is_over():
                yield skip(None, NO_TIME)
                continue
            for work in guarded(skip, None, self._work(kind, spec, dtype, shape)):
                if isinstance(work, Skipped):
                    yield work
                    continue
                direction, measure = work
                if budget.is_over():
                    yield skip(direction, NO_TIME)
                    continue
                chosen = budget.settings(usual, first=is_first)
                start = time.perf_counter()
                yield from guarded(skip, direction, measure(chosen))
                budget.took(time.perf_counter() - start, chosen)

    def _work(
        self, kind: str, spec: OpSpec, dtype: torch.dtype, shape: Shape
    ) -> Iterator[tuple[str | None, Callable[[Settings], Iterator[Measurement]]]]:
        """Directions and functions that measure them. Only one case is in memory at a time."""
        if kind == HOST:
            yield None, lambda s: time_host(spec, self.device, dtype, s.peers, left_out=s.left_out)
            return
        if kind == SMALL:
            small = partial(some, time_small, spec, self.device, dtype, shape=shape)
            for direction in self._directions(spec):
                yield direction, partial(small, direction=direction)
            return
        found = cases(spec, self.device, dtype, shape)
        for case in [next(found)] if kind in (SWEEP, ROWS) else found:
            for direction in self._directions(spec):
                for count in self.threads if kind == CALLS else self.threads[:1]:
                    one = partial(some, time_case, case, direction, count=count, kind=kind)
                    yield direction, one


def some(
    function: Callable[..., Measurement | None], *given: Any, **named: Any
) -> Iterator[Measurement]:
    """The row that ``function`` returns, if any."""
    row = function(*given, **named)
    if row is not None:
        yield row


def guarded(
    skip: Callable[[str | None, str], Skipped], direction: str | None, found: Iterator[Any]
) -> Iterator[Any]:
    """Yield the items of ``found``. An error with a known reason becomes a skip."""
    try:
        yield from found
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        yield skip(direction, reason)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
