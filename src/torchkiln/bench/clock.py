"""Clocks, and how several calls are timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count, repeat
from statistics import quantiles

import torch

Call = Callable[[], object]
Clock = Callable[[Call], float]

ROUNDS = 100
"""Measurements of each call, where the time budget allows them."""

FEWEST = 5
"""Measurements of each call, whatever the budget."""

SLEEP = 1_000_000
"""Clock cycles that a GPU is kept busy with: half a millisecond, in which the host gets ahead."""

DOUBLINGS = 6
"""How often the sleep is doubled for a call that takes the host longer."""


@dataclass(frozen=True)
class Times:
    """What the measurements of one call say, in seconds."""

    seconds: float
    """The median; for host times the best, because everything else only adds to them."""
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""
    rounds: int

    @property
    def spread(self) -> float:
        """The interquartile range as a share of the figure."""
        return (self.high - self.low) / self.seconds

    @classmethod
    def of(cls, measured: list[float], *, best: bool = False) -> Times:
        """Summarise at least two measurements."""
        low, median, high = quantiles(measured, n=4, method="inclusive")
        return cls(min(measured) if best else median, low, high, len(measured))


def cpu_clock(call: Call) -> float:
    """Seconds of one call; getting and giving back the memory of its result is a part of it.

    The same call comes right before: what it leaves in the caches and in the allocator would
    otherwise be the legacy of whoever had the turn before.
    """
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class CudaClock:
    """Seconds that one call takes the GPU, with an L2 cache that holds nothing of its tensors.

    The events lie in the stream right before and after the call's kernels. A GPU that waits for
    the host would put the host's time between them: torch.autograd.grad() takes the host longer
    than many a kernel runs. So the GPU first flushes its cache and then sleeps, and a measurement
    counts only if the first event was still ahead of the GPU when the host had queued the last.
    """

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.empty(2 * cache, dtype=torch.uint8, device=device)

    def __call__(self, call: Call) -> float:
        """Measure, with longer sleeps for calls that keep the host longer."""
        for doubling in count():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            torch.cuda._sleep(SLEEP << doubling)
            start.record()
            call()
            end.record()
            host_was_ahead = not start.query()
            end.synchronize()
            if host_was_ahead or doubling == DOUBLINGS:
                break
        return float(start.elapsed_time(end)) / 1e3


class HostClock:
    """Seconds that one call keeps the host, on average over many; no device is waited for."""

    def __init__(self, device: torch.device, calls: int = 500) -> None:
        self.device = device
        self.calls = calls

    def __call__(self, call: Call) -> float:
        """Measure."""
        start = time.perf_counter()
        for _ in repeat(None, self.calls):
            call()
        seconds = (time.perf_counter() - start) / self.calls
        synchronize(self.device)
        return seconds


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_clock(device: torch.device) -> Clock:
    """The clock of large calls."""
    return CudaClock(device) if device.type == "cuda" else cpu_clock


def in_turns(
    clock: Clock, calls: Mapping[str, Call], budget: float, rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Measure warm calls in turns, so that a busy or throttled machine is unfair to none.

    There are ``rounds`` of them, or as many as ``budget`` seconds allow.
    """
    for call in calls.values():
        clock(call)
    measured: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for done in range(rounds):
        if done >= FEWEST and time.perf_counter() - start >= budget:
            break
        for name, call in calls.items():
            measured[name].append(clock(call))
    return measured
