"""Findings about ncu and what the driver lets it read."""

from __future__ import annotations

import re
from pathlib import Path

from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts
from torchkiln.doctor.finding import Finding, note, ok

PLACES = (
    "/usr/local/cuda/bin/ncu",
    "/usr/local/cuda-*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
)
ADMIN, PERFMON = 21, 38  # bits of Linux's capabilities
COUNTERS_FOR_ALL = (
    "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee "
    "/etc/modprobe.d/nvidia-profiling.conf && sudo update-initramfs -u && sudo reboot"
)
IN_CONTAINER = "docker run --cap-add=SYS_ADMIN ... (driver 565 and later: --cap-add=PERFMON)"


def find_ncu(environment: Environment, facts: Facts) -> list[Finding]:
    """Whether it is there, and whether counters are for everyone."""
    if not facts.driver.device_there:
        return []
    path = environment.which("ncu") or _installed(environment)
    if path is None:
        package = "sudo apt-get install nsight-compute     (from NVIDIA's repository)"
        return [note("ncu", "not found: `torchkiln profile` times without counters", package)]
    restricted = re.search(
        r"RmProfilingAdminOnly: *1", environment.read("/proc/driver/nvidia/params")
    )
    if restricted and not _may_read_counters(environment):
        words = f"{path}, but the driver lets only administrators read the counters"
        return [note("ncu", words, COUNTERS_FOR_ALL, IN_CONTAINER)]
    return [ok("ncu", str(path))]


def _installed(environment: Environment) -> Path | None:
    for place in PLACES:
        if found := sorted(environment.root.glob(place.removeprefix("/"))):
            return found[-1]
    return None


def _may_read_counters(environment: Environment) -> bool:
    match = re.search(r"CapEff:\s*([0-9a-f]+)", environment.read("/proc/self/status"))
    held = int(match[1], 16) if match else 0
    return bool(held >> ADMIN & 1 or held >> PERFMON & 1)
