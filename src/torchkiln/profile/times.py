"""The kernels of a call and their times by torch's profiler, for use without counters."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from torchkiln.bench.clock import Call, synchronize
from torchkiln.bench.report import duration
from torchkiln.trace.kernel_names import pretty

SHOWN = 8
CALLS = 10
"""Calls that are profiled: the profiler slows down the first calls."""


def kernels(call: Call, device: torch.device) -> list[str]:
    """A line per kernel with its mean time, the longest first; on a CPU a line per op."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    call()
    synchronize(device)
    with no_stderr(), profile(activities=activities, acc_events=True) as seen:
        for _ in range(CALLS):
            call()
        synchronize(device)
    found: dict[str, float] = {}
    for event in seen.events() or ():
        is_kernel = event.device_type.name == "CUDA"
        if is_kernel != on_gpu:
            continue
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found[event.name] = found.get(event.name, 0.0) + micros / CALLS
    longest = sorted(found.items(), key=lambda item: item[1], reverse=True)[:SHOWN]
    return [f"{''.join(pretty(name))}: {duration(micros / 1e6)}" for name, micros in longest]


@contextmanager
def no_stderr() -> Iterator[None]:
    """Discard output to file descriptor 2, where torch's profiler library prints its state."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
