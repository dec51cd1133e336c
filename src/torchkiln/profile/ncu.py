"""Nsight Compute: find it, run it on one call, explain its refusals."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torchkiln.doctor.runtime import COUNTERS_FOR_ALL, installed_ncu
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
    """Counters cannot be read; the message has the reason and the remedies."""


def find() -> str:
    """The path of ncu; raises Unavailable if it is not installed."""
    if path := shutil.which("ncu"):
        return path
    if found := installed_ncu():
        return str(found)
    raise Unavailable(
        "ncu was not found on PATH, in /usr/local/cuda*/bin or in /opt/nvidia/nsight-compute.\n"
        "  It is part of the CUDA toolkit. Alone: apt install nsight-compute-<version> from "
        "NVIDIA's repository,\n  or the installer at https://developer.nvidia.com/nsight-compute"
    )


def command(ncu: str, report: Path, target: Sequence[str]) -> list[str]:
    """Command that profiles the kernels between cudaProfilerStart() and cudaProfilerStop().

    Clocks are those of the benchmark, and ncu flushes the caches before each pass as the benchmark
    does, so that durations can be compared.
    """
    return [
        *(ncu, "--force-overwrite", "--profile-from-start=off", "--clock-control=none"),
        *(f"--section={section}" for section in SECTIONS),
        f"--metrics={','.join(METRICS)}",
        *("-o", str(report.with_suffix(""))),
        *(sys.executable, "-m", "torchkiln.profile.target", *target),
    ]


def run(report: Path, target: Sequence[str]) -> str:
    """Profile a call, keep the report, return it as comma-separated values."""
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
        raise Unavailable("ncu saw no kernel: the call launches none, or only copies memory")
    if done.returncode != 0 or "==ERROR==" in said:
        lines = [line for line in said.strip().splitlines() if line.strip()]
        raise Unavailable(
            "\n  ".join([f"ncu failed (exit status {done.returncode}):", *lines[-8:]])
        )
    return done.stdout


def permission(profile: list[str]) -> str:
    """The reason why the driver refuses access to the counters, and commands that fix it."""
    kept = [f"{name}={os.environ[name]}" for name in KEPT if name in os.environ]
    return (
        "the driver lets only administrators read the counters (ERR_NVGPUCTRPERM). Ways out:\n"
        f"  as root, with this environment:  {shlex.join(['sudo', 'env', *kept, *profile])}\n"
        f"  for all users, until the file is removed:  {COUNTERS_FOR_ALL}\n"
        "  in a container:  docker run --cap-add=SYS_ADMIN ... (driver 565 and later: "
        "--cap-add=PERFMON), or the driver's option on its host\n"
        "  A rented machine may allow none of these; the times and the roofline of "
        "`torchkiln bench` need no counters"
    )
