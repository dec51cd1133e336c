"""What a run measures, in the order in which it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchkiln.bench.cases import BACKWARD, FORWARD, cases
from torchkiln.bench.host import time_host
from torchkiln.bench.measure import Settings, time_case
from torchkiln.bench.row import Row
from torchkiln.bench.small import SHAPES, time_small
from torchkiln.testing import OpSpec

Shape = tuple[int, int]

CALLS, SMALL, HOST = "calls", "small", "host"
DTYPES = (torch.float32, torch.bfloat16)


def default_shape(device: torch.device) -> Shape:
    """Enough elements that no cache holds them."""
    return (16384, 8192) if device.type == "cuda" else (4096, 4096)


@dataclass(frozen=True)
class Plan:
    """The choices of a run."""

    specs: tuple[OpSpec, ...]
    device: torch.device
    settings: Settings
    shapes: tuple[Shape, ...]
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
        rows = (
            self._calls(spec, dtype, directions)
            if kind == CALLS
            else (
                time_small(
                    spec, self.device, dtype, self.settings, shape=shape, direction=direction
                )
                for shape in SHAPES
                for direction in directions
            )
        )
        yield from (row for row in rows if row is not None)

    def _calls(
        self, spec: OpSpec, dtype: torch.dtype, directions: list[str]
    ) -> Iterator[Row | None]:
        for shape in self.shapes:
            for case in cases(spec, self.device, dtype, shape):
                for direction in directions:
                    for count in self.threads:
                        yield time_case(case, direction, self.settings, count)
