"""Clocks for the CPU, the GPU and the host, alternating calls, and the load by other processes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from statistics import quantiles

import torch

Call = Callable[[], object]
Clock = Callable[[Call], float]

ROUNDS = 100
"""Measurements per call, where the time budget allows them."""

FEWEST = 5
"""Minimum number of measurements per call, for any budget."""

SLEEP = 1_000_000
"""Clock cycles for which a GPU sleeps: half a millisecond, in which the host queues the call."""

DOUBLINGS = 6
"""Maximum number of doublings of the sleep, for a call that takes the host longer."""


@dataclass(frozen=True)
class Times:
    """Summary of the measurements of one call, in seconds."""

    seconds: float
    """The median; for host times the minimum, because interruptions only add to them."""
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""
    rounds: int

    @property
    def spread(self) -> float:
        """The interquartile range divided by :attr:`seconds`."""
        return (self.high - self.low) / self.seconds

    @classmethod
    def of(cls, measured: list[float], *, best: bool = False) -> Times:
        """Summarise at least two measurements, in six significant digits."""
        low, median, high = quantiles(measured, n=4, method="inclusive")
        seconds = min(measured) if best else median
        return cls(rounded(seconds, 6), rounded(low, 6), rounded(high, 6), len(measured))


def rounded(value: float, digits: int) -> float:
    """The number with ``digits`` significant digits."""
    return float(f"{value:.{digits}g}")


def cpu_clock(call: Call) -> float:
    """Seconds of one call, including the allocation and release of its result.

    An untimed call precedes each timed call, so that caches and allocator are in the state after
    this call, and not after a different call.
    """
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class CudaClock:
    """GPU seconds of one call, with none of its tensors in the L2 cache.

    Events are recorded in the stream before and after the kernels of the call. A GPU that waits
    for the host would add the host's time, and torch.autograd.grad() takes longer on the host than
    many kernels run. So the GPU first flushes the cache and sleeps. A measurement is valid only if
    the GPU has not reached the first event when the host has queued the last event.
    """

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.empty(2 * cache, dtype=torch.uint8, device=device)

    def __call__(self, call: Call) -> float:
        """Measure a call; double the GPU's sleep until the host queues the call in that time."""
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
    """Host seconds of one call: the mean of many calls, without a wait for a GPU."""

    def __init__(self, device: torch.device, calls: int = 500) -> None:
        self.device = device
        self.calls = calls

    def __call__(self, call: Call) -> float:
        """Seconds per call, as the mean of many calls."""
        start = time.perf_counter()
        for _ in repeat(None, self.calls):
            call()
        seconds = (time.perf_counter() - start) / self.calls
        synchronize(self.device)
        return seconds


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_clock(device: torch.device) -> Clock:
    """The clock for large calls on this device."""
    return CudaClock(device) if device.type == "cuda" else cpu_clock


def in_turns(
    clock: Clock, calls: Mapping[str, Call], budget: float, rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Measure warm calls in turns, so that a busy or throttled machine slows all calls equally.

    Every second turn is in reverse order, so that no call always follows the same one. Runs
    ``rounds`` turns, or as many as ``budget`` seconds allow, but at least ``FEWEST``.
    """
    order = list(calls.items())
    for call in calls.values():
        clock(call)
    measured: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for done in range(rounds):
        if done >= FEWEST and time.perf_counter() - start >= budget:
            break
        for name, call in order:
            measured[name].append(clock(call))
        order.reverse()
    return measured


SHORTEST_LOAD = 0.2
"""Shortest run, in seconds, whose load is computed. The system counts in steps of 10 ms per core:
a tenth of a core in this time."""


@dataclass(frozen=True)
class Load:
    """Use of the machine by other processes."""

    cores: int
    others: float
    """CPU cores that other processes kept busy, on average during the run."""
    gpu: float | None = None
    """Share of time in which the GPU ran kernels, right before the run."""

    @property
    def is_busy(self) -> bool:
        """Whether other processes may have slowed the run down."""
        return self.others > max(0.25, 0.1 * self.cores) or (self.gpu or 0.0) > 0.05

    def __str__(self) -> str:
        """A sentence about the load."""
        gpu = "" if self.gpu is None else f", and the GPU {self.gpu:.0%} before the run"
        return (
            f"busy machine: others used {self.others:.1f} of {self.cores} CPU cores during the "
            f"run{gpu}"
        )


class LoadMeter:
    """Measures the load by other processes since the creation of the meter."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = gpu_use(device) if device.type == "cuda" else None
        self.start = time.perf_counter()
        self.before = seconds_of_others()

    def read(self) -> Load | None:
        """The load since creation; None if the system does not count it or the run is too short."""
        after, cores = seconds_of_others(), os.cpu_count()
        seconds = time.perf_counter() - self.start
        if self.before is None or after is None or cores is None or seconds < SHORTEST_LOAD:
            return None
        return Load(cores, max(0.0, round((after - self.before) / seconds, 2)), self.gpu)


def seconds_of_others() -> float | None:
    """CPU seconds of all but this process and its descendants, since the start of the system."""
    try:
        ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
        user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
        busy = user + nice + system + irq + softirq + steal
        return (busy - own_ticks()) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, KeyError):
        return None


def own_ticks() -> int:
    """Clock ticks that this process and its descendants have used: compilers, for example."""
    found: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            words = path.read_text().rpartition(")")[2].split()
            found[int(path.parent.name)] = int(words[1]), sum(map(int, words[11:15]))
    total, pending = 0, [os.getpid()]
    while pending:
        pid = pending.pop()
        total += found[pid][1]
        pending += [child for child, (parent, _) in found.items() if parent == pid]
    return total


def gpu_use(device: torch.device) -> float | None:
    """Share of time in which a GPU runs kernels; None if nvidia-smi does not report it."""
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
    command = ("nvidia-smi", f"--id=GPU-{uuid}", *query)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return float(done.stdout) / 100
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
