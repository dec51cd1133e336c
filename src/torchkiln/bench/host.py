"""Rows of host time: how long one call of few elements keeps the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from torchkiln.bench import peers
from torchkiln.bench.bench_case import FORWARD, RECORDED, cases
from torchkiln.bench.clock import Call, HostClock, Times, in_turns
from torchkiln.bench.measure import prepare
from torchkiln.bench.row import Row
from torchkiln.testing import OpSpec

SHAPE = (4, 64)
ROUNDS = 7


def references(device: torch.device, dtype: torch.dtype, direction: str) -> dict[str, Call]:
    """Two of torch's own ops on as many elements, to see the machine by."""
    x = torch.randn(SHAPE, device=device, dtype=dtype, requires_grad=direction == RECORDED)
    return {
        "torch.add": lambda: torch.add(x, x),
        "F.layer_norm": lambda: F.layer_norm(x, SHAPE[1:]),
    }


def time_host(
    spec: OpSpec,
    device: torch.device,
    dtype: torch.dtype,
    names: tuple[str, ...],
    *,
    clock: HostClock | None = None,
    left_out: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """A row without gradients and one with a backward recorded."""
    case = next(cases(spec, device, dtype, SHAPE))
    for direction in (FORWARD, RECORDED) if spec.differentiable else (FORWARD,):
        with peers.backward_may_repeat():
            prepared = prepare([case], direction, names)
            calls = {name: batch[0] for name, batch in prepared.calls.items()}
            beside = references(device, dtype, direction)
            measured = in_turns(
                clock or HostClock(device), calls | beside, budget=float("inf"), rounds=ROUNDS
            )
        yield Row.of(
            "host",
            case,
            direction,
            {name: Times.of(values, best=True) for name, values in measured.items()},
            references=beside,
            missing={**prepared.missing, **(left_out or {})},
        )
