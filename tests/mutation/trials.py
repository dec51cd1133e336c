"""Selects tests that may catch a fault, and runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from planting import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fault import Fault

CONTRACT = "tests/contract/test_contract.py"
OPS = "tests/ops"
QUIET = ("-p", "no:cacheprovider", "--no-header", "--no-showlocals", "--tb=line")
LARGE = "2_to_the_31"
"""Part of the names of tests that need tens of gigabytes; one of them runs at a time."""
FAMILIES = """
import json, torchkiln
from torchkiln.testing.specs import FAMILIES
print(torchkiln.__file__)
print(json.dumps({spec.name: name for name, specs in FAMILIES.items() for spec in specs}))
"""
one_large_test = threading.Lock()


class Trial(NamedTuple):
    """The result of one run of tests."""

    result: str
    """caught, missed, or an error."""
    by: str = ""
    """The first failed test, or the text of the error."""


def environment(package: Path, threads: int = 0) -> dict[str, str]:
    """Environment variables with which Python imports the package in this folder."""
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    several = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return {**os.environ, "PYTHONPATH": path, **several}


def pytest(package: Path, *arguments: str, limit: float, threads: int = 0) -> tuple[int, str]:
    """Runs pytest with the package; returns exit status and output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *QUIET, *arguments],
        cwd=ROOT,
        env=environment(package, threads),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )
    return done.returncode, done.stdout


def families_of(package: Path) -> dict[str, str]:
    """The family of each op, computed by a Python that must import this package."""
    done = subprocess.run(
        [sys.executable, "-c", FAMILIES],
        env=environment(package),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"tests/mutation: torchkiln cannot be imported:\n{done.stderr[-2000:]}")
    file, families = done.stdout.strip().splitlines()[-2:]
    if not Path(file).is_relative_to(package):
        raise SystemExit(
            f"tests/mutation: torchkiln: got {file}, expected a module in {package}; an editable "
            "install comes before PYTHONPATH: uninstall it"
        )
    found: dict[str, str] = json.loads(families)
    return found


def failed_first(output: str) -> str:
    """The first test that failed, or the last one that began."""
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
    began = re.findall(r"^(tests/\S+?::(?:\w+\[.*?\]|\w+))(?= |$)", output, re.MULTILINE)
    return failed[1] if failed else began[-1] if began else ""


def run(package: Path, tests: Iterable[str], listed: Path, limit: float, threads: int) -> Trial:
    """Run tests until one fails; returns the result."""
    tests = list(tests)
    if not tests:
        return Trial("missed")
    listed.write_text("\n".join(tests))
    is_large = any(LARGE in test for test in tests)
    if is_large:
        one_large_test.acquire()
    try:
        status, output = pytest(package, "-x", "-v", f"@{listed}", limit=limit, threads=threads)
    except subprocess.TimeoutExpired:
        return Trial("timed out", f"{len(tests)} tests, {limit:.0f} s")
    finally:
        if is_large:
            one_large_test.release()
    if status == 0:
        return Trial("missed")
    if status == 1 or status < 0:
        return Trial("caught", failed_first(output))
    return Trial(f"pytest ended with {status}", " ".join(output[-300:].split()))


class Suite:
    """The tests of operators in a default run, which is the sample of a day, and in a full run."""

    def __init__(self, package: Path, day: int) -> None:
        self.package = package
        self.families = families_of(package)
        self.day = day
        self.collected: dict[str, list[str]] = {}
        self.lock = threading.Lock()

    def collect(self, option: str) -> list[str]:
        """The tests of a run; threads share one collection."""
        with self.lock:
            if option not in self.collected:
                options = ("--collect-only", "-q", option, CONTRACT, OPS)
                status, output = pytest(self.package, *options, limit=600)
                if status != 0:
                    raise SystemExit(f"tests/mutation: no tests are collected:\n{output[-2000:]}")
                found = [line for line in output.splitlines() if "::" in line]
                self.collected[option] = found
            return self.collected[option]

    @property
    def default(self) -> list[str]:
        """The tests of the default run."""
        return self.collect(f"--day={self.day}")

    @property
    def full(self) -> list[str]:
        """The tests of the full run."""
        return self.collect("--full")

    def expected(self, fault: Fault, tests: list[str]) -> list[str]:
        """The tests that the fault names and that can run on its device."""
        return [test for test in of_device(fault, tests) if is_named(fault, test)]

    def related(self, fault: Fault, tests: list[str]) -> list[str]:
        """The tests of the op's family, except those that need much memory."""
        family = self.families[fault.op]
        ops = "|".join(op for op, of in self.families.items() if of == family)
        pattern = re.compile(
            rf"{re.escape(CONTRACT)}::\w+\[(?:{ops})-|{OPS}/test_{family}\w*\.py::"
        )
        return [t for t in of_device(fault, tests) if pattern.match(t) and LARGE not in t]


def of_device(fault: Fault, tests: list[str]) -> list[str]:
    """The tests without those for another device than the fault's."""
    other = re.compile(r"[\[-]cpu[\]-]" if "cuda" in fault.device else r"[\[-]cuda[\]-]")
    return [test for test in tests if not other.search(test)]


def is_named(fault: Fault, test: str) -> bool:
    """Whether the fault names the test."""
    kind = "cuda" if "cuda" in fault.device else "cpu"
    for check in fault.checks.split(" or "):
        name, _, dtype = check.partition("@")
        case = f"{CONTRACT}::test_contract[{fault.op}-{name}-{kind}"
        if "::" in check:
            found = test.partition("[")[0] == f"{OPS}/{check}"
        elif dtype:
            found = test == f"{case}-{dtype}]"
        else:
            found = test == f"{case}]" or test.startswith(f"{case}-")
        if found:
            return True
    return False
