"""Findings about the driver and the GPUs."""

from __future__ import annotations

from torchkiln.doctor.driver import NO_DEVICE, Driver
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts
from torchkiln.doctor.finding import Finding, note, ok, problem

RELOAD = "sudo reboot"
# What cuInit answers, beside that there is no device.
ANSWERS = {
    34: ("libcuda.so.1 is the stub that only linkers need", "unset LD_LIBRARY_PATH"),
    802: (
        "the GPUs' fabric is not up yet, or its manager does not run",
        "sudo systemctl restart nvidia-fabricmanager",
    ),
    803: ("libcuda.so.1 and the loaded kernel module are of different versions", RELOAD),
    804: (
        "libcuda.so.1 is a newer one for data centre GPUs, which this GPU is not",
        "unset LD_LIBRARY_PATH",
        "sudo apt-get remove 'cuda-compat-*'",
    ),
    999: ("the driver does not say why", "sudo nvidia-modprobe -u -c=0", RELOAD),
}
# The driver with which a major version of CUDA came out; the minor ones run on it, too.
OLDEST_DRIVER = {"12": "525", "13": "580"}


def find_driver(_: Environment, facts: Facts) -> list[Finding]:
    """Whether there is a driver that answers."""
    driver = facts.driver
    if driver.library_error is None and driver.code in (0, NO_DEVICE):
        words = (
            f"{driver.version or 'of unknown version'}, runs up to CUDA {driver.cuda or 'unknown'}"
        )
        found = [ok("driver", words)]
        return [*found, *_smi(driver)]
    if driver.library_error is None:
        answer = ANSWERS.get(driver.code, (f"cuInit answers {driver.code}", RELOAD))
        return [problem("driver", answer[0], *answer[1:])]
    if driver.device_there:
        return [
            problem(
                "driver",
                f"there is a GPU ({', '.join(driver.present)}), but {driver.library_error}",
                "sudo ldconfig",
                "docker run --gpus all ...     (in a container)",
                f"sudo apt-get install {_package(facts)}",
            )
        ]
    return [*_smi(driver), note("driver", "none of NVIDIA's")]


def _smi(driver: Driver) -> list[Finding]:
    if driver.smi_error is None:
        return []
    return [problem("driver", f"nvidia-smi says: {driver.smi_error}", RELOAD)]


def _package(facts: Facts) -> str:
    major = ((facts.torch and facts.torch.cuda) or "13.0").split(".")[0]
    return f"nvidia-driver-{OLDEST_DRIVER.get(major, '580')}"


def find_gpus(environment: Environment, facts: Facts) -> list[Finding]:
    """Which GPUs a process sees."""
    driver = facts.driver
    if driver.gpus:
        return [ok("GPU", f"cuda:{index}: {gpu}") for index, gpu in enumerate(driver.gpus)]
    if (
        driver.present
        and (visible := environment.variables.get("CUDA_VISIBLE_DEVICES")) is not None
    ):
        words = f"CUDA_VISIBLE_DEVICES={visible!r} hides {', '.join(driver.present)}"
        return [problem("GPU", words, "unset CUDA_VISIBLE_DEVICES")]
    if driver.present and driver.code == NO_DEVICE:
        words = f"{', '.join(driver.present)} cannot be opened by this user or in this container"
        return [problem("GPU", words, "ls -l /dev/nvidia*", "docker run --gpus all ...")]
    return [note("GPU", "none that this process sees")]


def find_old_driver(_: Environment, facts: Facts) -> list[Finding]:
    """Whether the driver runs the CUDA of torch."""
    torch, cuda = facts.torch, facts.driver.cuda
    if not (torch and torch.cuda and cuda and facts.driver.gpus) or runs(cuda, torch.cuda):
        return []
    return [
        problem(
            "driver",
            f"runs up to CUDA {cuda}, but torch {torch.version} has CUDA {torch.cuda}",
            f"sudo apt-get install {_package(facts)}",
        )
    ]


def runs(driver: str, cuda: str) -> bool:
    """Whether a driver runs a CUDA: it does, of its own major version and of those before."""
    return int(driver.partition(".")[0]) >= int(cuda.partition(".")[0])
