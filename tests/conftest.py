"""Fixtures and markers shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchkiln
from torchkiln.jit.compile import toolkit

pytest_plugins = ["torchkiln.testing.plugin"]
collect_ignore = ["foreign_package"]  # a project with a root and plug-ins of its own


def pytest_addoption(parser: pytest.Parser) -> None:
    """What nox -s fuzz sets."""
    parser.addoption("--fuzz-cases", type=int, default=25, metavar="N", help="drawn calls an op")
    parser.addoption("--fuzz-device", default="cpu", metavar="DEVICE", help="where they run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Report what needs a GPU as skipped, with the reason, where there is none."""
    if not torch.cuda.is_available():
        reason = "no CUDA device"
    elif torchkiln.build_info()["cuda"] is None:
        reason = "this build has no CUDA kernels"
    else:
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each kind of device."""
    return torch.device("cuda:0" if request.param == "cuda" else "cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers for every test, whatever ran before."""
    torch.manual_seed(2026)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the test's own for what torchkiln.jit keeps."""
    monkeypatch.setenv("TORCHKILN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def nvrtc() -> toolkit.Toolkit:
    """What torchkiln.jit compiles with, if it is here."""
    try:
        return toolkit.find()
    except RuntimeError as error:
        pytest.skip(str(error).split("\n")[0])


@pytest.fixture
def traced() -> Callable[..., set[str]]:
    """Compiles a function at some arguments; returns the names of the functions in its graph."""

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
