"""Times of the ops and of eager torch, as rows of the benchmark."""

from __future__ import annotations

from statistics import geometric_mean
from typing import TYPE_CHECKING, TypeVar

import torch

from torchkiln.bench import Measurement
from torchkiln.bench.case import BACKWARD, FORWARD, cases
from torchkiln.bench.clock import device_clock
from torchkiln.bench.measure import Settings, time_case
from torchkiln.bench.peers import EAGER
from torchkiln.bench.plan import DTYPES
from torchkiln.bench.result import CALLS, Skipped, reason_of
from torchkiln.ops._traced import name_of
from torchkiln.ops.names import FAMILIES
from torchkiln.testing import SPECS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchkiln.demo.accuracy import Errors

Row = TypeVar("Row", "Measurement", "Errors")
"""A row with the name of its op."""


def all_timings(
    device: torch.device, shape: tuple[int, int], budget: float
) -> Iterator[Measurement | Skipped]:
    """Every op in float32 and bfloat16, forward and backward, ``budget`` seconds each."""
    settings = Settings(device_clock(device), (EAGER,), budget)
    count = torch.get_num_threads() if device.type == "cpu" else None
    for spec in SPECS:
        for dtype in DTYPES:
            try:
                case = next(cases(spec, device, dtype, shape))
                for direction in (FORWARD, BACKWARD) if spec.differentiable else (FORWARD,):
                    row = time_case(case, direction, settings, count)
                    if row is not None:
                        yield row
            except Exception as error:
                reason = reason_of(error)
                if reason is None:
                    raise
                yield Skipped(CALLS, spec.name, name_of(dtype), shape, None, reason)


def family(op: str) -> str:
    """The family of an op: the name of its module."""
    return next(family for family, ops in FAMILIES.items() if op in ops)


def by_family(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows, grouped by family."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(family(row.op), []).append(row)
    return found


def mean_speedup(rows: Sequence[Measurement]) -> float | None:
    """Geometric mean of the times of eager torch divided by ours."""
    return geometric_mean([row.speedup or 0.0 for row in rows]) if rows else None
