"""Times of every op, beside its peers and beside what the device can do at most.

``torchkiln bench [OP ...]`` measures and prints; ``--help`` lists the choices. What is timed comes
from the specs of :mod:`torchkiln.testing`. Functions of your own, beside what they replace::

    bench.bench(mine, torch.nn.functional.silu, x)

Single rows::

    from torchkiln import bench

    device = bench.default_device()
    settings = bench.Settings(bench.device_clock(device), peers=("eager",))
    for case in bench.cases(spec, device, torch.float32, (4096, 4096)):
        row = bench.time_case(case, "forward", settings)
"""

from torchkiln.bench.bench_case import BenchCase, cases, named
from torchkiln.bench.clock import CudaClock, HostClock, Times, cpu_clock, device_clock, in_turns
from torchkiln.bench.compared import Comparison, bench
from torchkiln.bench.host import time_host
from torchkiln.bench.machine import default_device
from torchkiln.bench.measure import Settings, time_case
from torchkiln.bench.memory import CudaGauge
from torchkiln.bench.plan import Plan
from torchkiln.bench.record import Record
from torchkiln.bench.regression import Change, Changes, changes
from torchkiln.bench.row import Row
from torchkiln.bench.skipped import Skipped
from torchkiln.bench.small import time_small
from torchkiln.bench.table import markdown, tables
from torchkiln.testing.environment import Environment, environment, processor

__all__ = [
    "BenchCase",
    "Change",
    "Changes",
    "Comparison",
    "CudaClock",
    "CudaGauge",
    "Environment",
    "HostClock",
    "Plan",
    "Record",
    "Row",
    "Settings",
    "Skipped",
    "Times",
    "bench",
    "cases",
    "changes",
    "cpu_clock",
    "default_device",
    "device_clock",
    "environment",
    "in_turns",
    "markdown",
    "named",
    "processor",
    "tables",
    "time_case",
    "time_host",
    "time_small",
]
