"""All findings, the device and kernel of each op that follow from these, and the printed report."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torchkiln import _report
from torchkiln._loader import mismatch
from torchkiln.doctor import Finding, compilers, gpu, note, package, runtime
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts, Gpu, gather
from torchkiln.ops.names import OPS

CHECKS: tuple[Callable[[Environment, Facts], list[Finding]], ...] = (
    gpu.find_driver,
    gpu.find_old_driver,
    gpu.find_gpus,
    package.find_torch,
    package.find_abi,
    package.find_build,
    package.find_cpu_build,
    gpu.find_architectures,
    package.find_import,
    compilers.find_nvcc,
    compilers.find_cuda_home,
    compilers.find_nvrtc,
    compilers.find_headers,
    compilers.find_cxx,
    compilers.find_cmake,
    runtime.find_ncu,
    runtime.find_caches,
    runtime.find_duplicates,
)
"""The checks, in the order of their output."""

PRODUCTS = ("matmul", "linear")
"""Ops with a kernel for compute capability 9.0, used for shapes where torch's is slower."""
WIDTH = 100


@dataclass(frozen=True)
class Verdict:
    """The device and kernel that one op runs on."""

    devices: tuple[str, ...]
    """Torch's names of the devices."""
    words: str


@dataclass(frozen=True)
class Report(_report.Report):
    """The result of an examination."""

    schema: ClassVar[str] = "torchkiln.doctor/1"

    facts: Facts
    findings: tuple[Finding, ...]
    verdicts: dict[str, Verdict]

    @property
    def problems(self) -> int:
        """Number of problems."""
        return sum(finding.state == "problem" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The report in JSON types."""
        torch = self.facts.torch
        return {
            "schema": self.schema,
            "python": sys.executable,
            "torch": torch and {**torch._asdict(), "folder": str(torch.folder)},
            "build": self.facts.record,
            "driver": asdict(self.facts.driver),
            "problems": self.problems,
            "findings": [asdict(finding) for finding in self.findings],
            "ops": {name: asdict(verdict) for name, verdict in self.verdicts.items()},
        }

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            state = "PROBLEM" if finding.state == "problem" else finding.state
            lines.append(f"{state:<8} {finding.topic}: {_indented(finding.words)}")
            lines += [
                f"{'or' if i else 'type':>13}  {_indented(remedy)}"
                for i, remedy in enumerate(finding.remedies)
            ]
        lines.append("")
        groups: dict[str, list[str]] = {}
        for name, verdict in self.verdicts.items():
            groups.setdefault(verdict.words, []).append(name)
        for words, names in groups.items():
            lines.append(textwrap.fill(f"{', '.join(names)}:", WIDTH))
            lines.append(textwrap.fill(words, WIDTH, initial_indent="  ", subsequent_indent="  "))
        lines += ["", f"{self.problems or 'no'} problem{'' if self.problems == 1 else 's'}"]
        return "\n".join(lines)


def _indented(words: str) -> str:
    return words.replace("\n", f"\n{'':15}")


def examine(environment: Environment) -> Report:
    """Run all checks of an environment."""
    facts = gather(environment)
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found += check(environment, facts)
        except OSError as error:
            topic = check.__name__.removeprefix("find_")
            found.append(note(topic, f"cannot be checked: {error}"))
    return Report(facts, tuple(found), {name: _verdict(name, facts) for name in OPS})


def _verdict(name: str, facts: Facts) -> Verdict:
    if reason := _why_nowhere(facts):
        return Verdict((), f"does not run, because {reason}")
    if reason := _why_cpu_only(facts):
        return Verdict(("cpu",), f"CPU only, because {reason}")
    words, devices = [], ["cpu"]
    for index, device in enumerate(facts.driver.gpus):
        target = f"cuda:{index}"
        kernel = _kernel(name, facts, device)
        if error := (facts.trial.error_on(target) if kernel else _why_no_kernel(device)):
            words.append(f"not on {target}, because {error}")
        else:
            devices.append(target)
            words.append(f"runs on {target} with the {kernel}")
    only = "CPU only: " if len(devices) == 1 else ""
    return Verdict(tuple(devices), only + "; ".join(words))


def _why_nowhere(facts: Facts) -> str | None:
    if facts.torch is None:
        return "there is no torch that could be imported"
    if facts.trial.torch_error:
        return f"torch cannot be imported: {_first_line(facts.trial.torch_error)}"
    if facts.record is None:
        return "torchkiln has not been built"
    if found := mismatch(facts.record, facts.torch):
        return f"torchkiln was built for {found.built}, and this is {found.here}"
    return f"its import fails: {_first_line(facts.trial.error)}" if facts.trial.error else None


def _why_cpu_only(facts: Facts) -> str | None:
    torch, record, driver = facts.torch, facts.record, facts.driver
    assert torch is not None  # _why_nowhere() gives a reason otherwise
    assert record is not None
    if not torch.cuda:
        return "torch has no CUDA"
    if not record["cuda"]:
        return "this build has no CUDA kernels"
    if not driver.gpus:
        hidden = f": {', '.join(driver.present)} cannot be used" if driver.present else ""
        return f"no GPU is visible{hidden}"
    if driver.cuda and not gpu.supports(driver.cuda, torch.cuda):
        return f"the driver runs up to CUDA {driver.cuda}, and torch has CUDA {torch.cuda}"
    return None


def _kernel(name: str, facts: Facts, device: Gpu) -> str | None:
    assert facts.record is not None  # _why_nowhere() gives a reason otherwise
    kernel = gpu.kernel_for(facts.record, device.capability)
    if kernel and name in PRODUCTS and device.capability == (9, 0):
        built = any(item.startswith("90") for item in facts.record["cuda_architectures"])
        return "sm_90a kernel or torch's product" if built else kernel
    return kernel


def _why_no_kernel(device: Gpu) -> str:
    if device.capability < gpu.OLDEST_GPU:
        return f"its compute capability is older than {'.'.join(map(str, gpu.OLDEST_GPU))}"
    return f"this build has no kernel for {device}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
