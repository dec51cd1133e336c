"""docs/fp8_accuracy.py runs its trainings, and its files contain the numbers that it prints."""

from __future__ import annotations

import json
from pathlib import Path

import fp8_accuracy
import pytest


def test_few_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "found.json", tmp_path / "found.png"
    words = ["--tiny", "--device", "cpu", "--commit", "abc"]
    fp8_accuracy.main([*words, "--out", str(out), "--picture", str(picture)])
    found = json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{") :]) == found["summary"]
    assert found["environment"]["commit"] == "abc"
    runs = {run["precision"]: run for run in found["runs"]}
    assert list(runs) == ["float32", "bfloat16", "fp8"]
    first = [run["losses"][0] for run in runs.values()]
    assert len(set(first)) == 3, "each precision rounds in its own way"
    assert max(first) < 1.01 * min(first), "the parameters and the batch are the same"
    assert all(len(run["losses"]) == fp8_accuracy.LOOKS for run in runs.values())
    assert found["summary"]["fp8_by_bfloat16"] == pytest.approx(
        runs["fp8"]["final"] / runs["bfloat16"]["final"]
    )
    assert [look["step"] for look in found["gradients"]] == list(range(fp8_accuracy.LOOKS + 1))
    for look in found["gradients"]:
        assert min(look["bfloat16"].values()) > 0.999
        assert 0.98 < min(look["fp8"].values()) < min(look["bfloat16"].values())
    assert picture.stat().st_size > 10_000
