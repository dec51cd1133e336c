"""What ``torchkiln watch`` does at a save: compile, test, tell."""

from __future__ import annotations

import re
import runpy
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from torchkiln.jit import CompileError, load
from torchkiln.jit.compile import driver, nvrtc
from torchkiln.jit.compile.build import architecture_of

TESTS = re.compile(r"^\s*(?:async\s+)?def test|^class Test", re.MULTILINE)
MOST_TIMED = 200
"""Launches of one kernel and grid that are timed: more say nothing else."""
MOST_SHOWN = 8
SLEEP_CYCLES = 100_000
"""What the GPU waits before a timed kernel: longer than the host takes to queue kernel and events,
so that the time between the events is the kernel's."""

PYTEST_OPTIONS = (
    *("-q", "--no-header", "-p", "no:cacheprovider"),
    # What watch has imported for all of its processes.
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
)

Times = dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]


def for_pytest(test: Path) -> bool:
    """Whether a file has test functions; without, it is a script."""
    return TESTS.search(test.read_text(encoding="utf-8")) is not None


@contextmanager
def timed_compiler() -> Iterator[list[float]]:
    """The seconds of every compilation; none where all came from the cache."""
    seconds: list[float] = []
    original = nvrtc.compile_program

    def compile_program(*given: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(*given)
        finally:
            seconds.append(time.perf_counter() - begin)

    with mock.patch.object(nvrtc, "compile_program", compile_program):
        yield seconds


@contextmanager
def timed_kernels() -> Iterator[Times]:
    """Events around every launch, by kernel and grid."""
    times: Times = defaultdict(list)
    original = driver.Function.launch

    def launch(self: driver.Function, grid: Any, block: Any, *rest: Any) -> None:
        def size(sizes: Sequence[int]) -> str:
            return "x".join(map(str, sizes)).removesuffix("x1").removesuffix("x1")

        pairs = times[f"{self.name}[{size(grid)}, {size(block)}]"]
        if driver.capturing() or len(pairs) >= MOST_TIMED:
            original(self, grid, block, *rest)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # ExternalStream(0) would be a new stream, not the default one.
        stream = torch.cuda.ExternalStream(rest[1]) if rest[1] else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            begin.record()
            original(self, grid, block, *rest)
            end.record()
        pairs.append((begin, end))

    with mock.patch.object(driver.Function, "launch", launch):
        yield times


def run_test(test: Path) -> bool:
    """Runs a test and says whether it passed; its own words are on the standard output."""
    if for_pytest(test):
        if find_spec("pytest") is None:
            print(f"torchkiln.watch: --test: {test} has test functions, for which type")
            print(f"  {sys.executable} -m pip install pytest")
            return False
        import pytest  # noqa: PLC0415  only where there are tests

        return pytest.main([str(test), *PYTEST_OPTIONS]) == 0
    sys.path.insert(0, str(test.resolve().parent))
    try:
        runpy.run_path(str(test), run_name="__main__")
    except SystemExit as end:
        return end.code in (None, 0)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return False
    return True


def kernel_lines(times: Times) -> list[str]:
    """The kernels, the slowest first."""
    torch.cuda.synchronize()
    best = {
        name: min(begin.elapsed_time(end) for begin, end in pairs) * 1e3
        for name, pairs in times.items()
        if pairs
    }
    ordered = sorted(best, key=lambda name: -best[name])
    lines = [f"{name}: {best[name]:.1f} us, best of {len(times[name])}" for name in ordered]
    hidden = len(lines) - MOST_SHOWN
    return lines[:MOST_SHOWN] + ([f"and {hidden} more that took less"] if hidden > 0 else [])


def attempt(source: Path, test: Path | None, include: Sequence[Path] = ()) -> int:
    """Compiles a file, runs its test, prints the verdict and the times; the exit status."""
    print(f"{time.strftime('%H:%M:%S')} {source.name}")
    passed = True
    with timed_compiler() as compiling, timed_kernels() as kernels:
        try:
            architecture = architecture_of()  # which also starts CUDA
            begin = time.perf_counter()
            load(source, include=include)
        except (CompileError, FileNotFoundError) as error:
            print(f"{error}\n  FAILED: {source.name} does not compile")
            return 1
        loading = time.perf_counter() - begin
        begin = time.perf_counter()
        if test is not None:
            passed = run_test(test)
        testing = time.perf_counter() - begin
    how = f"compiled in {sum(compiling):.2f} s" if compiling else f"cached, {loading:.3f} s"
    print(f"  {source.name}: {how}, for {architecture}")
    if torch.cuda.is_available():
        try:
            lines = kernel_lines(kernels)
        except RuntimeError as error:  # a kernel that read what it may not
            lines, passed = [f"{error}"], False
        for line in lines:
            print(f"  {line}")
    else:
        print("  no GPU: kernels are compiled, but cannot run")
    if test is not None:
        print(f"  {'passed' if passed else 'FAILED'}: {test.name}, {testing:.2f} s")
    return 0 if passed else 1
