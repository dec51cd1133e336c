"""Times beside eager torch, each pair in turns so that a busy machine is unfair to neither."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

from torchkiln.testing import SPECS, OpSpec, Sample, Traffic
from torchkiln.testing.contract.repeat import threads

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Medians in seconds of one op and of eager torch."""

    op: str
    dtype: torch.dtype
    shape: tuple[int, int]
    what: str
    setting: str
    ours: float
    eager: float
    traffic: Traffic

    @property
    def ratio(self) -> float:
        """How many times as fast as eager torch."""
        return self.eager / self.ours

    @property
    def rate(self) -> float:
        """Gigabytes per second of the least that has to be moved."""
        return self.traffic.bytes / self.ours / 1e9


def cpu_time(call: Call) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class CudaTime:
    """Seconds of one call by events, with an L2 cache that holds nothing of use."""

    def __init__(self, device: torch.device) -> None:
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def __call__(self, call: Call) -> float:
        """Measure."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(1_000_000)  # half a millisecond, in which the host gets ahead
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def compare(
    clock: Callable[[Call], float], ours: Call, eager: Call, budget: float
) -> tuple[float, float]:
    """Medians of both in turns, for about ``budget`` seconds."""
    for call in (ours, eager):
        call()
        call()
    times: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    while time.perf_counter() - start < budget or len(times[0]) < 5:
        times[0].append(clock(ours))
        times[1].append(clock(eager))
    return median(times[0]), median(times[1])


def calls(spec: OpSpec, sample: Sample, what: str) -> tuple[Call, Call]:
    """Our call and eager torch's."""
    if what == "forward":
        return lambda: sample.call(spec.op), lambda: sample.call(spec.composite)
    leaves = spec.leaves(sample)
    inputs = [leaves.args[i] for i in spec.wanted(leaves)]
    found: list[Call] = []
    for function in (spec.op, spec.composite):
        output = leaves.call(function)
        grad = torch.randn_like(output)

        def call(output: torch.Tensor = output, grad: torch.Tensor = grad) -> object:
            return torch.autograd.grad(output, inputs, grad, retain_graph=True)

        found.append(call)
    return found[0], found[1]


def settings(device: torch.device) -> list[tuple[str, int]]:
    """What the table tells apart: threads on a CPU."""
    if device.type == "cuda":
        return [(torch.cuda.get_device_name(device), torch.get_num_threads())]
    counts = sorted({1, min(2, os.cpu_count() or 1)})
    return [(f"{n} thread{'s' * (n > 1)}", n) for n in counts]


def all_timings(device: torch.device, *, quick: bool) -> Iterator[Timing]:
    """Every op in float32 and bfloat16, forward and backward."""
    clock = CudaTime(device) if device.type == "cuda" else cpu_time
    shape = (1024, 1024) if quick else (16384, 8192) if device.type == "cuda" else (4096, 4096)
    for spec in SPECS:
        for dtype in (torch.float32, torch.bfloat16):
            sample = spec.bench(device, dtype, shape)
            for what, traffic in (
                ("forward", spec.traffic(sample)),
                ("backward", spec.backward_traffic(sample)),
            ):
                # A gradient that is handed through takes no time that could be compared.
                if traffic.bytes == 0:
                    continue
                for setting, count in settings(device):
                    with threads(count):
                        ours, eager = calls(spec, sample, what)
                        pair = compare(clock, ours, eager, 0.2 if quick else 1.0)
                    yield Timing(spec.name, dtype, shape, what, setting, *pair, traffic)
