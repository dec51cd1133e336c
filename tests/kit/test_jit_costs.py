"""docs/jit_costs.py runs with a compiler and without a GPU, and writes its tables."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("own_cache", "nvrtc")


@pytest.fixture
def costs() -> ModuleType:
    """docs/jit_costs.py, imported."""
    path = Path(__file__).resolve().parents[2] / "docs" / "jit_costs.py"
    spec = spec_from_file_location("jit_costs", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_but_the_extension(
    costs: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All figures are present. Every step runs in this process, so the figures mean little."""

    def child(*words: object, folder: Path) -> Any:
        monkeypatch.setenv("TORCHKILN_CACHE", str(folder / "cache"))
        return costs.process([*map(str, words), str(folder)])

    monkeypatch.setattr(costs, "child", child)
    written = tmp_path / "costs.json"
    options = ["--rounds", "2", "--without-extension", "--json", str(written)]
    monkeypatch.setattr(sys, "argv", ["jit_costs.py", *options])
    costs.main()
    found = json.loads(written.read_text())
    assert {route: set(steps) for route, steps in found["starts"].items()} == {
        "jit.load": {"cold", "warm", "changed", "import", "saved"},
        "jit.elementwise": {"cold", "warm", "changed", "import"},
    }
    load = found["starts"]["jit.load"]
    assert [len(load[step]) for step in ("cold", "warm", "changed", "saved")] == [2] * 4
    assert max(load["warm"]) < min(load["cold"] + load["changed"] + load["saved"])
    assert bool(found["calls"]) == torch.cuda.is_available()
    out = capsys.readouterr().out
    assert f"| an empty cache | 1.0 s | {sum(load['cold']) / 2:.3f} s | " in out


def test_results_are_checked(costs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = costs.Problem()
    monkeypatch.setattr(problem, "device", "cuda")  # so that the check compares results
    problem.results = [torch.full_like(y, 5.0) for _, y in problem.pairs]
    problem.require(2.0)
    with pytest.raises(RuntimeError, match=r"got 5\.0, expected 7\.0"):
        problem.require(3.0)
