"""Nsight Compute: found, run on one call, and what it means when it refuses."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from torchkiln.doctor.runtime import COUNTERS_FOR_ALL
from torchkiln.doctor.runtime import NCU_PLACES as PLACES
from torchkiln.profile.report import METRICS

SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "Occupancy",
    "LaunchStats",
    "WarpStateStats",
    "SchedulerStats",
)
KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
TIMEOUT = 300


class Unavailable(Exception):  # noqa: N818 - a state of the machine
    """There are no counters to be had; the message says why, and the ways out."""


def find() -> str:
    """The path of ncu."""
    if path := shutil.which("ncu"):
        return path
    for place in PLACES:
        if found := sorted(Path("/").glob(place[1:])):
            return str(found[-1])
    raise Unavailable(
        "ncu was not found on PATH, in /usr/local/cuda*/bin or in /opt/nvidia/nsight-compute.\n"
        "  It comes with the CUDA toolkit, and alone: apt install nsight-compute-<version> from "
        "NVIDIA's repository,\n  or the installer at https://developer.nvidia.com/nsight-compute"
    )


def command(ncu: str, report: Path, target: list[str]) -> list[str]:
    """What profiles the kernels between cudaProfilerStart() and cudaProfilerStop().

    Clocks are left alone, so that durations are those of the benchmark; ncu flushes the caches
    before each pass, as the benchmark does.
    """
    return [
        *(ncu, "--force-overwrite", "--profile-from-start=off", "--clock-control=none"),
        *(f"--section={section}" for section in SECTIONS),
        f"--metrics={','.join(METRICS)}",
        *("-o", str(report.with_suffix(""))),
        *(sys.executable, "-m", "torchkiln.profile.target", *target),
    ]


def run(report: Path, target: list[str]) -> str:
    """Profile, keep the report, and return it as comma-separated values."""
    ncu = find()
    report.parent.mkdir(parents=True, exist_ok=True)
    profile = command(ncu, report, target)
    _call(profile, profile)
    page = [ncu, "--import", str(report), "--csv", "--page=raw", "--print-units=base"]
    return _call(page, profile)


def _call(words: list[str], profile: list[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"ncu was not done after {TIMEOUT} s") from error
    except OSError as error:
        raise Unavailable(f"{words[0]} cannot be run: {error}") from error
    said = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said:
        raise Unavailable(permission(profile))
    if "No kernels were profiled" in said:
        raise Unavailable("ncu saw no kernel in the call: it launches none, or only copies memory")
    if done.returncode != 0 or "==ERROR==" in said:
        lines = [line for line in said.strip().splitlines() if line.strip()]
        raise Unavailable(
            "\n  ".join([f"ncu failed (exit status {done.returncode}):", *lines[-8:]])
        )
    return done.stdout


def permission(profile: list[str]) -> str:
    """Why the driver refuses counters, and what to type."""
    kept = [f"{name}={os.environ[name]}" for name in KEPT if name in os.environ]
    return (
        "the driver lets only administrators read the counters (ERR_NVGPUCTRPERM). Ways out:\n"
        f"  as root, with this environment:  {shlex.join(['sudo', 'env', *kept, *profile])}\n"
        f"  for everyone, until the option is taken back:  {COUNTERS_FOR_ALL}\n"
        "  in a container:  docker run --cap-add=SYS_ADMIN ... (driver 565 and later: "
        "--cap-add=PERFMON), or the driver's option on its host\n"
        "  on a rented machine none of these may be allowed; times and the roofline of "
        "`torchkiln bench` need no counters"
    )
