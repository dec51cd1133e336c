"""The machine and the versions of a run."""

from __future__ import annotations

import datetime as dt
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

import torchkiln


@dataclass(frozen=True)
class Environment:
    """The hardware and versions that a result or a time depends on."""

    date: str
    device: str
    driver: str | None
    torch: str
    cuda: str | None
    torchkiln: str
    commit: str | None
    """The commit of the torchkiln checkout in the current folder; None outside of a checkout."""

    def __str__(self) -> str:
        """One line for the head of a table."""
        driver = f" (driver {self.driver})" if self.driver else ""
        cuda = f", CUDA {self.cuda}" if self.cuda else ""
        commit = f" ({self.commit[:12]})" if self.commit else ""
        return (
            f"{self.device}{driver}, torch {self.torch}{cuda}, "
            f"torchkiln {self.torchkiln}{commit}, {self.date}"
        )


def environment(device: torch.device) -> Environment:
    """The facts of this machine, with today's date."""
    gpu = device.type == "cuda"
    return Environment(
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        device=torch.cuda.get_device_name(device) if gpu else processor(),
        driver=driver() if gpu else None,
        torch=torch.__version__,
        cuda=torch.version.cuda if gpu else None,
        torchkiln=torchkiln.__version__,
        commit=commit(),
    )


def processor() -> str:
    """The model of the CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [
        line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def output_of(*command: str) -> str | None:
    """The output of a command; None if it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def driver() -> str | None:
    """The version of the GPU's driver."""
    lines = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0] if lines else None


def commit() -> str | None:
    """The commit of the torchkiln checkout, with a mark if the working tree has changes."""
    root = output_of("git", "rev-parse", "--show-toplevel")
    if root is None or not Path(root, "src", "torchkiln", "bench").is_dir():
        return None
    return output_of("git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
