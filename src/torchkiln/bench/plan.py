"""What a run measures, in the order in which it does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchkiln.bench.cases import BACKWARD, FORWARD, cases
from torchkiln.bench.host import time_host
from torchkiln.bench.measure import Settings, time_case
from torchkiln.bench.row import Row
from torchkiln.bench.small import SHAPES, time_small
from torchkiln.bench.sweep import sweep_shapes
from torchkiln.testing import OpSpec

Shape = tuple[int, int]

CALLS, SWEEP, SMALL, HOST = "calls", "sweep", "small", "host"
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

    def pieces(self) -> list[tuple[str, Iterator[Row]]]:
        """What is to be done, in words, and the rows that come of it when it is gone through."""
        found = []
        for kind in self.kinds:
            for spec in self.specs:
                for dtype in (dtype for dtype in self.dtypes if dtype in spec.dtypes):
                    words = f"{spec.name} {str(dtype).removeprefix('torch.')}, {kind}"
                    found.append((words, self._rows(kind, spec, dtype)))
        return found

    def _rows(self, kind: str, spec: OpSpec, dtype: torch.dtype) -> Iterator[Row]:
        directions = [d for d in self.directions if d == FORWARD or spec.differentiable]
        if kind == HOST:
            yield from time_host(spec, self.device, dtype, self.settings.peers)
            return
        timed = {CALLS: self._calls, SWEEP: self._sweep, SMALL: self._small}[kind]
        yield from (row for row in timed(spec, dtype, directions) if row is not None)

    def _calls(
        self, spec: OpSpec, dtype: torch.dtype, directions: list[str]
    ) -> Iterator[Row | None]:
        for shape in self.shapes or shapes_of(spec, self.device):
            for case in cases(spec, self.device, dtype, shape):
                for direction in directions:
                    for count in self.threads:
                        yield time_case(case, direction, self.settings, count)

    def _sweep(
        self, spec: OpSpec, dtype: torch.dtype, directions: list[str]
    ) -> Iterator[Row | None]:
        for shape in sweep_shapes(math.prod(default_shape(self.device))):
            case = next(cases(spec, self.device, dtype, shape))
            for direction in directions:
                yield time_case(case, direction, self.settings, self.threads[0], kind=SWEEP)

    def _small(
        self, spec: OpSpec, dtype: torch.dtype, directions: list[str]
    ) -> Iterator[Row | None]:
        for shape in spec.small_shapes or SHAPES:
            for direction in directions:
                yield time_small(
                    spec, self.device, dtype, self.settings, shape=shape, direction=direction
                )
