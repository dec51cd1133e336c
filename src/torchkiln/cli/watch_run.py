"""One run of ``torchkiln watch``: compile, test, print."""

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
"""Maximum number of timed launches per kernel and grid."""
MOST_SHOWN = 8
SLEEP_CYCLES = 100_000
"""Delay on the GPU before a timed kernel. The host queues kernel and events in less time, so that
the time between the events is the time of the kernel."""

PYTEST_OPTIONS = (
    *("-q", "--no-header", "-p", "no:cacheprovider"),
    # torchkiln.cli.watch imports pytest before it forks.
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
)

Times = dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]


def has_tests(test: Path) -> bool:
    """Whether a file has test functions, which pytest runs; other files run as scripts."""
    return TESTS.search(test.read_text(encoding="utf-8")) is not None


@contextmanager
def timed_compiler() -> Iterator[list[float]]:
    """Collects the seconds of each compilation; empty if all code came from the cache."""
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
    """Collects events around each launch, by kernel and grid."""
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
    """Run a test, which prints to standard output; returns whether it passed."""
    if has_tests(test):
        if find_spec("pytest") is None:
            print(f"torchkiln.watch: --test: {test} has test functions, which need pytest; type")
            print(f"  {sys.executable} -m pip install pytest")
            return False
        import pytest  # noqa: PLC0415  an optional dependency

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
    """A line per kernel, the slowest first."""
    torch.cuda.synchronize()
    best = {
        name: min(begin.elapsed_time(end) for begin, end in pairs) * 1e3
        for name, pairs in times.items()
        if pairs
    }
    ordered = sorted(best, key=lambda name: -best[name])
    lines = [f"{name}: {best[name]:.1f} us, best of {len(times[name])}" for name in ordered]
    hidden = len(lines) - MOST_SHOWN
    return lines[:MOST_SHOWN] + ([f"and {hidden} faster ones"] if hidden > 0 else [])


def compile_and_test(source: Path, test: Path | None, include: Sequence[Path] = ()) -> int:
    """Compile a file, run its test, print the result and the times; returns the exit status."""
    print(f"{time.strftime('%H:%M:%S')} {source.name}")
    passed = True
    with timed_compiler() as compiling, timed_kernels() as kernels:
        try:
            architecture = architecture_of()  # also initialises CUDA, before the time is taken
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
        except RuntimeError as error:  # such as an illegal memory access of a kernel
            lines, passed = [f"{error}"], False
        for line in lines:
            print(f"  {line}")
    else:
        print("  no GPU: kernels are compiled, but cannot run")
    if test is not None:
        print(f"  {'passed' if passed else 'FAILED'}: {test.name}, {testing:.2f} s")
    return 0 if passed else 1
