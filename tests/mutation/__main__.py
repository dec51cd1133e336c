"""Plants each fault in a copy of the sources and checks that a test fails.

python tests/mutation --device cuda --build build/dev --jobs 14 --tests 8

needs a build folder of Ninja that was built from these sources without batches of files
(-DTORCHKILN_UNITY=OFF, the default), and no editable install of torchkiln. For each fault it
compiles only the changed file, with the command of the build, and links only its library. It does
not change the sources or the build. Faults that need other hardware are left out.

For each fault it runs the tests that the fault names, then all tests of the family of its op: first
those of the default run, then those of the full run, until one fails. A test that fails without the
fault, too, does not count. Results are kept in a file; the next run tries only the faults that no
test has caught.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from fault import Fault
from faults import FAULTS
from page import Finding, Results, digest_of, write
from planting import ROOT, Build, plant
from trials import Suite, Trial, pytest, run


class Bench:
    """The state that all faults share: the build, the suite, and the numbers of parallel jobs."""

    def __init__(self, options: argparse.Namespace, machine: str) -> None:
        self.scratch: Path = options.scratch.resolve()
        self.clean = self.scratch / "clean" / "torchkiln"
        self.build = Build(options.build)
        self.build.install(self.clean)
        self.suite = Suite(self.clean.parent, options.day)
        self.builders = threading.Semaphore(options.jobs)
        self.testers = threading.Semaphore(options.tests)
        self.limit: float = options.limit
        self.machine = machine
        cores = os.cpu_count() or 1
        self.threads = max(cores // options.tests, 1) if options.device == "cuda" else 0

    def find(self, fault: Fault) -> Finding:
        """Plant one fault, and run tests until one fails."""
        folder = self.scratch / re.sub(r"\W+", "-", fault.name)
        kind, start = "default", time.perf_counter()
        try:
            with self.builders:
                package = plant(self.build, self.clean, fault, folder)
            with self.testers:
                tests = self.suite.default
                start = time.perf_counter()
                kind, trial = self.try_tests(fault, package, tests)
        except (ValueError, subprocess.SubprocessError) as error:
            trial = Trial("not planted", str(error))
        shutil.rmtree(folder, ignore_errors=True)
        today = dt.datetime.now(dt.UTC).date().isoformat()
        seconds = round(time.perf_counter() - start, 1)
        return Finding(
            *(fault.name, digest_of(fault), trial.result, kind, trial.by, seconds),
            *(self.machine, today),
        )

    def try_tests(self, fault: Fault, package: Path, tests: list[str]) -> tuple[str, Trial]:
        """Run tests until one fails; returns the kind of run ("default", "full") and the trial."""
        default = self.suite.expected(fault, tests)
        related = self.suite.related(fault, tests)
        listed = package / "tests.txt"
        for some in (default, [test for test in related if test not in set(default)]):
            trial = run(package, some, listed, self.limit, self.threads)
            if trial.result != "missed":
                return "default", trial
        full = self.suite.full
        tried = {*default, *related}
        every = [*self.suite.expected(fault, full), *self.suite.related(fault, full)]
        rest = [test for test in dict.fromkeys(every) if test not in tried]
        return "full", run(package, rest, listed, self.limit, self.threads)

    def fail_without_a_fault(self, tests: set[str]) -> set[str]:
        """The given tests that also fail with the package without a fault."""
        if not tests:
            return set()
        listed = self.scratch / "found.txt"
        listed.write_text("\n".join(sorted(tests)))
        _, output = pytest(self.clean.parent, f"@{listed}", limit=1800, threads=self.threads)
        failed = set(re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE))
        return tests if "passed" not in output else failed


def gpus() -> list[str]:
    """The names of all GPUs."""
    import torch  # noqa: PLC0415  # slow, and not needed to write the page

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tests/mutation", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--build", type=Path, help="a build folder of Ninja; without it, --page is written only")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--only", default="", help="faults whose name has this in it")
    add("--jobs", type=int, default=1, help="faults that are compiled at the same time")
    add("--tests", type=int, default=1, help="faults that are tested at the same time")
    add("--limit", type=float, default=300, help="seconds for the tests of a fault")
    add("--day", type=int, default=dt.datetime.now(dt.UTC).date().toordinal(), help="the sample")
    add("--scratch", type=Path, default=ROOT / "build" / "mutation")
    add("--results", type=Path, default=ROOT / "build" / "mutation.json")
    add("--page", type=Path, help="write the tables of this page: docs/mutation.md")
    return parser.parse_args()


def try_faults(options: argparse.Namespace, results: Results) -> None:
    """Try all faults of one device that no test has caught yet."""
    names = gpus()
    needed = {"cpu": 0, "cuda": 1, "2 x cuda": 2}
    start = time.perf_counter()
    chosen = [f for f in FAULTS if options.device in f.device and options.only in f.name]
    faults = [f for f in chosen if needed[f.device] <= len(names) and not results.is_done(f)]
    for fault in chosen:
        if needed[fault.device] > len(names):
            print(f"left out: {fault.name}: needs {fault.device}")

    def unconfirmed() -> list[Finding]:
        found = [results.found[f.name] for f in chosen if f.name in results.found]
        return [one for one in found if one.result == "caught" and not one.passes_without]

    if not faults and not unconfirmed():
        return
    bench = Bench(options, "the CPU" if options.device == "cpu" else names[0])

    def say(text: str) -> None:
        print(f"{time.perf_counter() - start:5.0f} s  {text}", flush=True)

    with ThreadPoolExecutor(len(faults) + 1) as pool:
        tests = pool.submit(lambda: len(bench.suite.default))
        tasks = [pool.submit(bench.find, fault) for fault in faults]
        say(f"{len(faults)} faults, {tests.result()} tests in the default run")
        for task in as_completed(tasks):
            one = task.result()
            results.add(one)
            say(f"{one.result}: {one.fault} ({one.run}: {one.by}), {one.seconds:.0f} s")
    wrong = bench.fail_without_a_fault({one.by for one in unconfirmed() if one.by})
    for one in unconfirmed():
        if one.by in wrong:
            say(f"fails without the fault, too: {one.by}")
            results.add(one._replace(result="fails without the fault"))
        else:
            results.add(one._replace(passes_without=True))
    say("done")


def main() -> int:
    """Try the faults of one device, then write the page."""
    options = arguments()
    results = Results(options.results)
    if options.build:
        try_faults(options, results)
    if options.page:
        write(options.page, results)
    chosen = {f.name for f in FAULTS if options.device in f.device and options.only in f.name}
    missed = [one for one in results.found.values() if one.fault in chosen]
    return int(any(one.result != "caught" for one in missed))


if __name__ == "__main__":
    sys.exit(main())
