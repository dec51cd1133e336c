"""Times of random calls beside eager torch, and those that are slower.

A call counts as slower if it takes more than the time of torch / :data:`LEAST` + :data:`SLACK`. It
is then measured again, with more rounds, before it is said to be. The host time of calls up to
:data:`SMALL_BYTES` is judged in the same way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from torchkiln.bench.case import call_of
from torchkiln.bench.clock import Call, Clock, HostClock, Times, device_clock, in_turns
from torchkiln.bench.draws import Draw, drawn, key, text
from torchkiln.bench.report import duration
from torchkiln.bench.result import reason_of
from torchkiln.testing import OpSpec
from torchkiln.testing.compare import outputs

LEAST = 0.95
SLACK = 1e-6
"""Seconds."""
SMALL_BYTES = 1 << 16
FIRST, AGAIN = 5, 25
"""Rounds of the first measurement, and of the one that decides."""
HOST_CALLS = 50


@dataclass(frozen=True)
class Timed:
    """The times of one drawn call."""

    key: str
    """The seed and the number of the call."""
    op: str
    dtype: str
    direction: str
    layout: str
    bytes: int
    """Bytes of the tensors of the call."""
    seconds: float
    eager: float
    """Seconds of eager torch."""
    host: float | None
    """Seconds that the call occupies the host, for small calls."""
    eager_host: float | None
    call: str
    """The call as Python code."""

    @property
    def speedup(self) -> float:
        """Time of torch divided by ours: the smaller one of device and host."""
        ratios = [self.eager / self.seconds]
        if self.host is not None and self.eager_host is not None:
            ratios.append(self.eager_host / self.host)
        return min(ratios)

    @property
    def is_slower(self) -> bool:
        """Whether the call is slower than torch by more than is allowed."""
        on_host = (
            self.host is not None
            and self.eager_host is not None
            and loses(self.host, self.eager_host)
        )
        return on_host or loses(self.seconds, self.eager)

    def line(self) -> str:
        """A row of the list of slower calls."""
        host = (
            ""
            if self.host is None or self.eager_host is None
            else (f", host {duration(self.host)} / {duration(self.eager_host)}")
        )
        return (
            f"{self.speedup:.2f} x  {duration(self.seconds)} / {duration(self.eager)}{host}  "
            f"{self.direction}  {self.call}"
        )


def loses(ours: float, theirs: float) -> bool:
    """Whether a time is longer than allowed."""
    return ours > theirs / LEAST + SLACK


def best(clock: Clock, calls: Mapping[str, Call], *, least: bool = False) -> tuple[float, float]:
    """Seconds of both calls; measured again if ours would be slower."""
    found = (0.0, 0.0)
    for rounds in (FIRST, AGAIN):
        measured = in_turns(clock, calls, float("inf"), rounds)
        ours, theirs = (Times.of(values, best=least).seconds for values in measured.values())
        found = ours, theirs
        if not loses(ours, theirs):
            break
    return found


def timed(draw: Draw) -> Timed:
    """Measure a drawn call."""
    case, direction = draw.case, draw.direction
    sample = case.sample
    device = sample.tensors[0].device
    results = outputs(sample.call(case.spec.op))
    grads = [torch.randn_like(result) for result in results]
    calls = {
        "ours": call_of(case, case.spec.op, direction, grads),
        "eager": call_of(case, case.spec.composite, direction, grads),
    }
    seconds, eager = best(device_clock(device), calls)
    size = sum(tensor.nbytes for tensor in sample.tensors)
    host = eager_host = None
    if size <= SMALL_BYTES and device.type == "cuda":
        host, eager_host = best(HostClock(device, HOST_CALLS), calls, least=True)
    name = str(case.dtype).removeprefix("torch.")
    op = f"{case.spec.name} {case.variant}".strip()
    return Timed(
        *(draw.key, op, name, direction, draw.layout, size),
        *(seconds, eager, host, eager_host, text(draw)),
    )


def fuzz(
    specs: Sequence[OpSpec],
    device: torch.device,
    *,
    count: int,
    seed: int,
    seconds: float | None = None,
    file: Path | None = None,
) -> tuple[list[Timed], bool]:
    """Time random calls; those in ``file`` are taken from there, others are added to it.

    The flag is false if the time was over, or Ctrl-C pressed, before the last call.
    """
    done = read(file) if file is not None and file.exists() else {}
    found: list[Timed] = []
    start = time.perf_counter()
    try:
        for number in range(count):
            if seconds is not None and time.perf_counter() - start > seconds:
                return found, False
            one = done.get(key(seed, number)) or draw_and_time(specs, device, seed, number)
            if one is None:
                continue
            if file is not None and one.key not in done:
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(asdict(one)) + "\n")
            found.append(one)
    except KeyboardInterrupt:
        return found, False
    return found, True


def draw_and_time(
    specs: Sequence[OpSpec], device: torch.device, seed: int, number: int
) -> Timed | None:
    """The times of a drawn call; none if it is too large, or refused."""
    try:
        draw = drawn(specs, device, seed, number)
        return None if draw is None else timed(draw)
    except Exception as error:
        if reason_of(error) is None:
            raise
        return None


def read(file: Path) -> dict[str, Timed]:
    """The calls of an earlier run."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return {one.key: one for one in (Timed(**json.loads(line)) for line in lines if line)}


def summary(found: Sequence[Timed]) -> list[str]:
    """The slower calls, worst first, and the counts."""
    slower = sorted((one for one in found if one.is_slower), key=lambda one: one.speedup)
    return [
        *(one.line() for one in slower),
        f"{len(slower)} of {len(found)} calls are slower than {LEAST} x eager torch + 1 us",
    ]
