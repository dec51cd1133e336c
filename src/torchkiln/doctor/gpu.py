"""Findings about the driver, the GPUs and the kernels that this build has for them."""

from __future__ import annotations

import re
from typing import Any

from torchkiln._loader import rebuild
from torchkiln.doctor import Finding, note, ok, problem
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import NO_DEVICE, Facts

REBOOT = "sudo reboot"
# Descriptions of cuInit's error codes, with the commands that help.
INIT_ERRORS = {
    34: ("libcuda.so.1 is a stub, made for linking only", "unset LD_LIBRARY_PATH"),
    802: (
        "the fabric between the GPUs is not ready, or its manager is not running",
        "sudo systemctl restart nvidia-fabricmanager",
    ),
    803: ("libcuda.so.1 and the loaded kernel module have different versions", REBOOT),
    804: (
        "libcuda.so.1 is the compatibility library for data centre GPUs, and this GPU is not one",
        "unset LD_LIBRARY_PATH",
        "sudo apt-get remove 'cuda-compat-*'",
    ),
    999: ("the driver gives no reason", "sudo nvidia-modprobe -u -c=0", REBOOT),
}
# First driver that supports each major version of CUDA, minor versions included.
OLDEST_DRIVER = {"12": "525", "13": "580"}
OLDEST_GPU = (7, 5)
NATIVE = "torchkiln.cuda-architectures=native"


def find_driver(_: Environment, facts: Facts) -> list[Finding]:
    """Whether a driver is installed and answers."""
    driver = facts.driver
    smi = []
    if driver.smi_error is not None:
        smi = [problem("driver", f"nvidia-smi says: {driver.smi_error}", REBOOT)]
    if driver.library_error is None and driver.code in (0, NO_DEVICE):
        version = driver.version or "unknown version"
        return [ok("driver", f"{version}, runs up to CUDA {driver.cuda or 'unknown'}"), *smi]
    if driver.library_error is None:
        answer = INIT_ERRORS.get(driver.code, (f"cuInit fails with code {driver.code}", REBOOT))
        return [problem("driver", answer[0], *answer[1:])]
    if not driver.device_there:
        return [*smi, note("driver", "no NVIDIA driver")]
    return [
        problem(
            "driver",
            f"there is a GPU ({', '.join(driver.present)}), but {driver.library_error}",
            "sudo ldconfig",
            "docker run --gpus all ...     (in a container)",
            f"sudo apt-get install {_driver_package(facts)}",
        )
    ]


def find_old_driver(_: Environment, facts: Facts) -> list[Finding]:
    """Report a driver that does not support torch's CUDA version."""
    torch, cuda = facts.torch, facts.driver.cuda
    if not (torch and torch.cuda and cuda and facts.driver.gpus) or supports(cuda, torch.cuda):
        return []
    words = f"runs up to CUDA {cuda}, but torch {torch.version} has CUDA {torch.cuda}"
    return [problem("driver", words, f"sudo apt-get install {_driver_package(facts)}")]


def supports(driver: str, cuda: str) -> bool:
    """Whether a driver for CUDA ``driver`` runs CUDA ``cuda``: the same major version, or older."""
    return int(driver.partition(".")[0]) >= int(cuda.partition(".")[0])


def _driver_package(facts: Facts) -> str:
    major = ((facts.torch and facts.torch.cuda) or "13.0").split(".")[0]
    return f"nvidia-driver-{OLDEST_DRIVER.get(major, '580')}"


def find_gpus(environment: Environment, facts: Facts) -> list[Finding]:
    """Which GPUs a process sees."""
    driver = facts.driver
    if driver.gpus:
        return [ok("GPU", f"cuda:{index}: {gpu}") for index, gpu in enumerate(driver.gpus)]
    names = ", ".join(driver.present)
    visible = environment.variables.get("CUDA_VISIBLE_DEVICES")
    if names and visible is not None:
        words = f"CUDA_VISIBLE_DEVICES={visible!r} hides {names}"
        return [problem("GPU", words, "unset CUDA_VISIBLE_DEVICES")]
    if names and driver.code == NO_DEVICE:
        words = f"{names} cannot be opened by this user or in this container"
        return [problem("GPU", words, "ls -l /dev/nvidia*", "docker run --gpus all ...")]
    return [note("GPU", "none visible to this process")]


def find_architectures(_: Environment, facts: Facts) -> list[Finding]:
    """Whether the build has kernels for each GPU."""
    record = facts.record
    if record is None or record["cuda"] is None:
        return []
    found = []
    for index, gpu in enumerate(facts.driver.gpus):
        words = f"none for cuda:{index}, {gpu}"
        if gpu.capability < OLDEST_GPU:
            needed = ".".join(map(str, OLDEST_GPU))
            found.append(note("kernels", f"{words}: they need {needed} or newer"))
        elif kernel_for(record, gpu.capability) is None:
            found.append(problem("kernels", words, rebuild(NATIVE)))
    return found


def kernel_for(record: dict[str, Any], capability: tuple[int, int]) -> str | None:
    """The code in a build that a GPU runs: machine code, else PTX, else None."""
    built = [(*_parse(name), name) for name in record["cuda_architectures"]]
    # Machine code runs on later GPUs of the same major version; sm_90a runs only on 9.0.
    fitting = [
        (number, name)
        for number, suffix, name in built
        if number == capability or (suffix != "a" and number[0] == capability[0])
        if number <= capability
    ]
    if fitting:
        return f"sm_{max(fitting)[1]} kernel"
    portable = [(*_parse(name), name) for name in record.get("cuda_ptx", [])]
    older = [
        (number, name) for number, suffix, name in portable if not suffix and number <= capability
    ]
    return f"PTX of sm_{max(older)[1]}, which the driver compiles" if older else None


def _parse(name: str) -> tuple[tuple[int, int], str]:
    """Compute capability and suffix of an architecture: (9, 0) and "a" for 90a."""
    match = re.fullmatch(r"(\d+)(\d)([af]?)", name)
    return ((int(match[1]), int(match[2])), match[3]) if match else ((0, 0), "")
