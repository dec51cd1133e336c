"""The generated parts of README.md and docs/ come from docs/results, schemas and specs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType

import pytest
import torch

import torchkiln
from torchkiln import bench
from torchkiln.bench import fuzz
from torchkiln.bench.case import cases
from torchkiln.bench.clock import HostClock, cpu_clock
from torchkiln.bench.measure import Settings, time_case, time_host
from torchkiln.bench.result import Skipped
from torchkiln.testing import matrix
from torchkiln.testing.contract import CHECKS
from torchkiln.testing.environment import environment
from torchkiln.testing.specs import FAMILIES
from torchkiln.testing.specs.bias_act import BIAS_ACT

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def figures() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    sys.path.insert(0, str(ROOT / "docs"))  # figures.py imports op_reference from docs/
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def record() -> bench.Record:
    settings = Settings(cpu_clock, ("eager",), 0.0)
    case = next(cases(BIAS_ACT, CPU, torch.float32, (8, 16)))
    rows = [time_case(case, direction, settings, 1) for direction in ("forward", "backward")]
    host = time_host(BIAS_ACT, CPU, torch.float32, ("eager",), clock=HostClock(CPU, calls=2))
    found = (*(row for row in rows if row is not None), *host)
    skipped = Skipped("calls", "add", "float32", (9, 9), None, "out of memory: much")
    return bench.Record(environment(CPU), found, (skipped,))


@pytest.fixture
def page(tmp_path: Path, record: bench.Record) -> list[str]:
    """Arguments for a page and results in a folder of the test."""
    docs = tmp_path / "docs"
    record.write(docs / "results" / "here.json")
    (tmp_path / "README.md").write_text("# Title\n")
    text = "# Title\n\n<!-- results:here -->\n<!-- /results:here -->\n\nEnd.\n"
    (docs / "performance.md").write_text(text)
    (docs / "ops.md").write_text(
        "## The contract of a family\n\n<!-- ops:all -->\n<!-- /ops:all -->\n"
    )
    return [f"--root={tmp_path}"]


def test_pages_are_up_to_date(figures: ModuleType) -> None:
    assert figures.main(["--check"]) == 0


def test_writing_and_checking(
    figures: ModuleType, page: list[str], tmp_path: Path, record: bench.Record
) -> None:
    pytest.importorskip("matplotlib")
    assert figures.main(["--check", *page]) == 1
    assert figures.main(page) == 0
    assert figures.main(["--check", *page]) == 0
    docs = tmp_path / "docs"
    text = (docs / "performance.md").read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\nEnd.\n")
    assert str(dataclasses.replace(record.environment, commit=None)) in text
    assert "| | float32 forward | float32 backward |" in text
    assert f"| `bias_act` 8 x 16 | {figures.cell(record.rows[0])} | " in text
    assert "![share](results/here-share.png)" in text
    assert "out of memory: much" in text
    assert (docs / "results" / "here-host.png").read_bytes()[1:4] == b"PNG"
    ops = (docs / "ops.md").read_text()
    assert re.findall("^## (.*)", ops, re.MULTILINE) == [*FAMILIES, "The contract of a family"]
    options = "eps=None, *, offset=0.0, round='once', out=None"
    call = f"torchkiln.rms_norm(x, normalized_shape, weight=None, {options})"
    assert f"| `{call}` |" in ops


def test_another_figure_is_noticed(figures: ModuleType, page: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert figures.main(page) == 0
    path = tmp_path / "docs" / "results" / "here.json"
    content = json.loads(path.read_text())
    content["rows"][0]["times"]["torchkiln"]["seconds"] *= 1.5
    path.write_text(json.dumps(content))
    assert figures.main(["--check", *page]) == 1


def test_another_signature_is_noticed(figures: ModuleType, page: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert figures.main(page) == 0
    path = tmp_path / "docs" / "ops.md"
    path.write_text(path.read_text().replace("eps=None", "eps=1.0"))
    assert figures.main(["--check", *page]) == 1


def test_random_calls_that_lose_are_counted(figures: ModuleType, tmp_path: Path) -> None:
    calls = [
        fuzz.Timed(f"1:{n}", "relu", "", "forward", "", 8, 1e-4, eager, None, None, f"relu({n})")
        for n, eager in enumerate((2e-4, 0.5e-4, 1e-4, 0.2e-4))
    ]
    path = tmp_path / "gpu_fuzz.jsonl"
    fuzz.Summary.of({"device": "GPU", "torch": "2"}, calls).write(path)
    assert path.read_text().count("\n") == 5  # machine, total, relu, two slower calls
    assert '"calls": 4, "slower": 2, "median": 0.75' in path.read_text()
    text = figures.random_calls(path)
    assert "2 (50.0%) of 4 calls" in text
    assert "at least 0.75 times" in text
    assert re.findall(r"relu\((\d)\)", text) == ["3", "1"]


def test_every_file_has_its_place(
    figures: ModuleType, page: list[str], tmp_path: Path, record: bench.Record
) -> None:
    dataclasses.replace(record).write(tmp_path / "docs" / "results" / "elsewhere.json")
    with pytest.raises(SystemExit, match=r"blocks \['here'\], expected \['elsewhere', 'here'\]"):
        figures.main(["--check", *page])


def test_every_public_function_and_module_is_on_the_page_of_ops() -> None:
    text = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    others = {
        "aoti_options",
        "build_info",
        "explain",
        "include_path",
        "nn",
        "cmake_prefix_path",
        "__version__",
        "CrossEntropyOutput",
        "Quantized",
        "QuantizedWeight",
    }
    for name in set(torchkiln.__all__) - others - {"fuse", "replace", "replaced"}:  # in models.md
        assert f"| `torchkiln.{name}(" in text, name
    for name in torchkiln.nn.__all__:
        assert f"| `torchkiln.nn.{name}(" in text, name


def test_pictures_are_shown() -> None:
    """Each picture in docs/results is on a page, and each picture of a page exists."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    shown = {
        (page.parent / path).resolve()
        for page in pages
        for path in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == set((ROOT / "docs" / "results").glob("*.png"))


def test_the_facts_of_the_readme_are_measured() -> None:
    """Numbers in the README's sentences below the picture agree with the records."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = bench.Record.read(ROOT / "docs" / "results" / "h100_rows.json").rows
    norms = [
        row.speedup
        for row in rows
        if row.kind == "calls" and "norm" in row.op and row.direction == "backward" and row.speedup
    ]
    assert f"the {len(norms)} measured backward calls" in readme
    assert f"are {geometric_mean(norms):.2f} times" in readme
    assert f"(geometric mean; {min(norms):.2f} to {max(norms):.2f} times)" in readme
    for run in ("cpu", "cuda"):
        ops = matrix.Run.read(ROOT / "docs" / "contract" / f"{run}.json").ops
        found = [check["status"] for checks in ops.values() for check in checks.values()]
        counts = (
            f"{found.count('passed'):,} of {len(found):,} passed ({len(ops)} ops)",
            f"{found.count('passed'):,} of {len(found):,} ({len(ops)} ops)",
        )
        assert any(count in readme for count in counts)
        assert "failed" not in found
        assert f"Up to {len(CHECKS)} kinds of checks" in readme


def test_the_readme_names_every_op() -> None:
    """The README's table has every function and module of docs/ops.md except in-place ones."""
    calls = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^\| `torchkiln\.(?:nn\.)?(\w+)\(", calls, re.MULTILINE))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("## Operators") : readme.index("## The kit")]
    assert {name for name in names if not name.endswith("_")} <= set(re.findall(r"`(\w+)`", table))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_measurements_stay_short() -> None:
    """Files of results have a line per row, 2,500 in all; docs/performance.md has at most 250."""
    docs = ROOT / "docs"
    files = [*(docs / "results").glob("*.json*"), *(docs / "contract").glob("*.json*")]
    lines = [path.read_text(encoding="utf-8").count("\n") for path in files]
    assert sum(lines) <= 2500
    assert len((docs / "performance.md").read_text(encoding="utf-8").splitlines()) <= 250
