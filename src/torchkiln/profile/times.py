"""Without counters: the kernels of a call and their times, from torch's profiler."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from torchkiln.bench.clock import Call, synchronize
from torchkiln.bench.table import duration
from torchkiln.trace.kernel_names import pretty

MOST = 8


def kernels(call: Call, device: torch.device) -> list[str]:
    """A line each, the longest first; ops instead of kernels on a CPU."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    call()
    synchronize(device)
    with profile(activities=activities, acc_events=True) as seen:
        call()
        synchronize(device)
    found: dict[str, float] = {}
    for event in seen.events() or ():
        is_kernel = event.device_type.name == "CUDA"
        if is_kernel != on_gpu:
            continue
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found[event.name] = found.get(event.name, 0.0) + micros
    longest = sorted(found.items(), key=lambda item: item[1], reverse=True)[:MOST]
    return [f"{''.join(pretty(name))}: {duration(micros / 1e6)}" for name, micros in longest]
