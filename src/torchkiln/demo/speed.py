"""Times beside eager torch: the benchmark's rows, without those peers that take long to build."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchkiln.bench import Row, Settings, cases, device_clock, time_case
from torchkiln.bench.bench_case import BACKWARD, FORWARD
from torchkiln.bench.peers import EAGER
from torchkiln.bench.plan import DTYPES, default_shape
from torchkiln.testing import SPECS

if TYPE_CHECKING:
    from collections.abc import Iterator


def all_timings(device: torch.device, *, quick: bool) -> Iterator[Row]:
    """Every op in float32 and bfloat16, forward and backward."""
    settings = Settings(device_clock(device), (EAGER,), budget=0.2 if quick else 1.5)
    shape = (1024, 1024) if quick else default_shape(device)
    count = torch.get_num_threads() if device.type == "cpu" else None
    for spec in SPECS:
        for dtype in DTYPES:
            case = next(cases(spec, device, dtype, shape))
            for direction in (FORWARD, BACKWARD) if spec.differentiable else (FORWARD,):
                row = time_case(case, direction, settings, count)
                if row is not None:
                    yield row
