"""The tables of the README come from the runs in results/."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torchkiln import bench
from torchkiln.testing.specs.bias_act import BIAS_ACT

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def record() -> bench.Record:
    settings = bench.Settings(bench.cpu_clock, ("eager",), 0.0)
    case = next(bench.cases(BIAS_ACT, CPU, torch.float32, (8, 16)))
    rows = [bench.time_case(case, direction, settings, 1) for direction in ("forward", "backward")]
    host = bench.time_host(
        BIAS_ACT, CPU, torch.float32, ("eager",), clock=bench.HostClock(CPU, calls=2)
    )
    found = (*(row for row in rows if row is not None), *host)
    skipped = bench.Skipped("calls", "add", "float32", (9, 9), None, "out of memory: much")
    return bench.Record(bench.environment(CPU), found, (skipped,))


@pytest.fixture
def page(tmp_path: Path, record: bench.Record) -> list[str]:
    """Arguments for a README and results of their own."""
    record.write(tmp_path / "results" / "here.json")
    readme = tmp_path / "README.md"
    readme.write_text("# Title\n\n<!-- results:here -->\n<!-- /results:here -->\n\nEnd.\n")
    return [f"--readme={readme}", f"--results={tmp_path / 'results'}"]


def test_the_readme_is_that_of_the_results(figures: ModuleType) -> None:
    assert figures.main(["--check"]) == 0


def test_writing_and_checking(
    figures: ModuleType, page: list[str], tmp_path: Path, record: bench.Record
) -> None:
    pytest.importorskip("matplotlib")
    assert figures.main(["--check", *page]) == 1
    assert figures.main(page) == 0
    assert figures.main(["--check", *page]) == 0
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\nEnd.\n")
    assert str(record.environment) in text
    assert "| | float32 forward | float32 backward |" in text
    assert f"| `bias_act` 8 x 16 | {figures.cell(record.rows[0])} | " in text
    assert "| `bias_act` float32 recorded | " in text
    assert "![share](results/here-share.png)" in text
    assert "out of memory: much" in text
    assert (tmp_path / "results" / "here-host.png").read_bytes()[1:4] == b"PNG"


def test_another_figure_is_noticed(figures: ModuleType, page: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert figures.main(page) == 0
    path = tmp_path / "results" / "here.json"
    content = json.loads(path.read_text())
    content["rows"][0]["times"]["torchkiln"]["seconds"] *= 1.5
    path.write_text(json.dumps(content))
    assert figures.main(["--check", *page]) == 1


def test_every_file_has_its_place(
    figures: ModuleType, page: list[str], tmp_path: Path, record: bench.Record
) -> None:
    dataclasses.replace(record).write(tmp_path / "results" / "elsewhere.json")
    with pytest.raises(SystemExit, match=r"blocks \['here'\] .*files \['elsewhere', 'here'\]"):
        figures.main(["--check", *page])
