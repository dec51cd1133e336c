"""docs/zoo_times.py: its lines, the cells that a later run leaves out, and the summary."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchkiln.patch.forms import NOT_FASTER

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script with one model and few cells."""
    spec = spec_from_file_location("zoo_times", DOCS / "zoo_times.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "zoo_times", module)
    spec.loader.exec_module(module)
    recurrent = [entry for entry in module.ZOO if not entry.library]
    monkeypatch.setattr(module, "ZOO", recurrent)
    monkeypatch.setattr(module, "DTYPES", {"float32": torch.float32})
    monkeypatch.setattr(module, "BATCHES", (2,))
    monkeypatch.setattr(module, "SECONDS", 0.01)
    precision = torch.get_float32_matmul_precision()
    yield module
    torch.set_float32_matmul_precision(precision)


def test_lines_and_summary(zoo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "zoo.jsonl"
    words = ["--device", "cpu", "--commit", "abc", "--out", str(out)]
    zoo.main(words)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["mode"] for row in rows) == sorted(zoo.MODES)
    for row in rows:
        assert row["environment"]["commit"] == "abc"
        assert min(row["was"], row["now"], row["gain"]) > 0
    capsys.readouterr()
    zoo.main(words)
    assert capsys.readouterr().out == ""  # all cells are in the file
    zoo.main(["--summary", str(out)])
    said = capsys.readouterr().out
    assert f"| all |  | {len(rows)} |" in said
    assert "recurrent, float32, 2, step" in said


def test_a_cell_that_fails_is_a_line(
    zoo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "ZOO", (zoo.Entry("timm", "no such model"),))
    out = tmp_path / "zoo.jsonl"
    zoo.main(["--device", "cpu", "--commit", "abc", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(zoo.MODES)
    assert all(row["skipped"] for row in rows)
    assert list(zoo.summary(rows))[-1].startswith("skipped: timm no such model")


def test_cells_say_what_became_of_channels_last(
    zoo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "ZOO", (zoo.Entry("torchvision", "convolution", 8),))
    monkeypatch.setattr(zoo.Entry, "build", lambda _: nn.Sequential(nn.Conv2d(3, 4, 3)))
    out = tmp_path / "zoo.jsonl"
    zoo.main(["--device", "cpu", "--commit", "abc", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(zoo.MODES)
    for row in rows:
        assert ("activations in channels_last" in row["replaced"]) != (NOT_FASTER in row["left"])


def test_parts_have_all_cells(zoo: Any) -> None:
    parts = [zoo.cells(part, 4) for part in range(4)]
    assert sorted(map(str, itertools.chain(*parts))) == sorted(map(str, zoo.cells(0, 1)))
