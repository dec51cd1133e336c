"""All that is looked at, in the order in which it is told."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torchkiln.doctor import caches, compilers, counters, gpu, package, runtimes
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.facts import Facts, gather
from torchkiln.doctor.finding import Finding, note
from torchkiln.doctor.verdicts import Verdict, verdicts

FINDINGS: tuple[Callable[[Environment, Facts], list[Finding]], ...] = (
    gpu.find_driver,
    gpu.find_old_driver,
    gpu.find_gpus,
    package.find_torch,
    package.find_abi,
    package.find_build,
    package.find_cpu_build,
    package.find_architectures,
    package.find_import,
    compilers.find_nvcc,
    compilers.find_cuda_home,
    compilers.find_nvrtc,
    compilers.find_headers,
    compilers.find_cxx,
    compilers.find_cmake,
    counters.find_ncu,
    caches.find_caches,
    runtimes.find_runtimes,
)
WIDTH = 100


@dataclass(frozen=True)
class Examination:
    """What came of it."""

    facts: Facts
    findings: tuple[Finding, ...]
    verdicts: dict[str, Verdict]

    @property
    def problems(self) -> int:
        """How many there are."""
        return sum(finding.state == "problem" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        folder = self.facts.torch and str(self.facts.torch.folder)
        return {
            "python": sys.executable,
            "torch": self.facts.torch and {**self.facts.torch._asdict(), "folder": folder},
            "build": self.facts.record,
            "driver": asdict(self.facts.driver),
            "problems": self.problems,
            "findings": [asdict(finding) for finding in self.findings],
            "ops": {name: asdict(verdict) for name, verdict in self.verdicts.items()},
        }

    def __str__(self) -> str:
        """For people."""
        lines = []
        for finding in self.findings:
            state = "PROBLEM" if finding.state == "problem" else finding.state
            lines.append(f"{state:<8} {finding.topic}: {_indented(finding.words)}")
            lines += [
                f"{'type' if i == 0 else 'or':>13}  {_indented(remedy)}"
                for i, remedy in enumerate(finding.remedies)
            ]
        lines.append("")
        groups: dict[str, list[str]] = {}
        for name, verdict in self.verdicts.items():
            groups.setdefault(verdict.words, []).append(name)
        for words, names in groups.items():
            lines.append(textwrap.fill(f"{', '.join(names)}:", WIDTH))
            lines.append(textwrap.fill(words, WIDTH, initial_indent="  ", subsequent_indent="  "))
        count = self.problems
        lines += ["", f"{count or 'no'} problem{'' if count == 1 else 's'}"]
        return "\n".join(lines)


def _indented(words: str) -> str:
    return words.replace("\n", f"\n{'':15}")


def examine(environment: Environment) -> Examination:
    """Look at everything."""
    facts = gather(environment)
    found: list[Finding] = []
    for find in FINDINGS:
        try:
            found += find(environment, facts)
        except OSError as error:
            found.append(note(find.__name__.removeprefix("find_"), f"not looked at: {error}"))
    return Examination(facts, tuple(found), verdicts(facts))
