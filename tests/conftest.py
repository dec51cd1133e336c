"""Fixtures and markers shared by all tests."""

from __future__ import annotations

import fcntl
import gc
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import sampling
import torch

import torchkiln
from torchkiln.jit.compile import toolkit
from torchkiln.ops import _folding

import_module("setuptools")  # torch.compile's own late import of it can fail

pytest_plugins = ["torchkiln.testing.plugin"]
collect_ignore = ["foreign_package"]  # a separate project with its own conftest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the sample, and those of nox -s fuzz."""
    sampling.add_options(parser)
    parser.addoption("--fuzz-cases", type=int, default=25, metavar="N", help="drawn calls an op")
    parser.addoption("--fuzz-device", default="cpu", metavar="DEVICE", help="where they run")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the sample; each worker has one thread of torch, as workers share the cores."""
    config.addinivalue_line("markers", sampling.ROTATES)
    sampling.choose_day(config)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> str:
    """The line of the header that names the sample."""
    return sampling.header(config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the number of skipped tests by reason, instead of a line per test."""
    for line in sampling.skips(terminalreporter):
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests outside of the sample; skip tests that need a GPU, with a reason."""
    sampling.select(config, items)
    if not torch.cuda.is_available():
        reason = "no CUDA device"
    elif torchkiln.build_info()["cuda"] is None:
        reason = "this build has no CUDA kernels"
    else:
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt the 850,000 objects of pytest's collection from garbage collection.

    Otherwise each collection takes half a second longer; tests of memory run many of them.
    """
    gc.freeze()


MODULES = pytest.StashKey[int]()
MANY = 200
"""Modules whose objects take a collection of garbage tens of milliseconds."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Leave the modules that tests have imported out of later collections, too."""
    known = item.config.stash.setdefault(MODULES, len(sys.modules))
    if len(sys.modules) > known + MANY:
        gc.collect()
        gc.freeze()
        item.config.stash[MODULES] = len(sys.modules)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A CPU and a GPU, in turn."""
    return torch.device("cuda:0" if request.param == "cuda" else "cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed the random numbers of every test, so that they do not depend on earlier tests.

    Without a GPU, torch.manual_seed() takes half a millisecond to note what it would seed later.
    """
    on_any_device = torch.manual_seed if torch.cuda.is_available() else None
    (on_any_device or torch.default_generator.manual_seed)(2026)


@pytest.fixture(autouse=True)
def one_large_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """A lock with which at most one large test of all workers runs on the CPU, and one on the GPU.

    Each of them checks the free memory before it allocates, so two could exceed it together.
    """
    if not request.node.get_closest_marker("large"):
        yield
        return
    on_gpu = bool(request.node.get_closest_marker("cuda"))
    with Path(__file__ if on_gpu else sampling.__file__).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        yield
        if on_gpu:
            torch.cuda.empty_cache()


@pytest.fixture
def no_folds() -> Iterator[None]:
    """Drops folds of earlier tests, and disables TensorFloat-32."""
    _folding.FOLDS.clear()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
    _folding.FOLDS.clear()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate cache folder of torchkiln.jit for each test."""
    monkeypatch.setenv("TORCHKILN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def nvrtc() -> toolkit.Toolkit:
    """The NVRTC that torchkiln.jit compiles with; skips if there is none."""
    try:
        return toolkit.find()
    except RuntimeError as error:
        pytest.skip(str(error).split("\n")[0])


@pytest.fixture
def traced() -> Callable[..., set[str]]:
    """Compiles a function for these arguments; returns the names of the calls in its graph."""

    def trace(function: Callable[..., Any], *args: Any) -> set[str]:
        found: set[str] = set()

        def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            calls = [n for n in graph.graph.nodes if n.op.startswith("call_")]
            found.update(str(n.target) for n in calls)
            return graph.forward

        torch.compiler.reset()
        torch.compile(function, fullgraph=True, backend=backend)(*args)
        return found

    return trace
