"""Times of every op, of its peers, and of its ceiling: a copy of as many bytes.

``torchkiln bench [OP ...]`` measures and prints; ``--help`` lists the choices. The calls that are
timed come from the specs of :mod:`torchkiln.testing`. Two functions of your own::

    bench.bench(mine, torch.nn.functional.silu, x)

Single rows::

    from torchkiln import bench

    device = bench.default_device()
    settings = bench.Settings(bench.device_clock(device), peers=("eager",))
    for case in bench.cases(spec, device, torch.float32, (4096, 4096)):
        row = bench.time_case(case, "forward", settings)
"""

from torchkiln.bench.case import BenchCase, cases, named
from torchkiln.bench.clock import CudaClock, HostClock, Times, cpu_clock, device_clock, in_turns
from torchkiln.bench.comparison import Comparison, bench
from torchkiln.bench.measure import CudaGauge, Settings, time_case, time_host, time_small
from torchkiln.bench.plan import Plan, default_device
from torchkiln.bench.regression import Change, Changes, changes
from torchkiln.bench.report import markdown, tables
from torchkiln.bench.result import Measurement, Record, Skipped
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
    "Measurement",
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
