"""torchkiln demo: errors, speeds, training, and its output."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchkiln import bench
from torchkiln.bench.result import Skipped
from torchkiln.demo import accuracy, report, speed
from torchkiln.demo.__main__ import main
from torchkiln.demo.train import Outcome, train_both
from torchkiln.testing import SPECS, OpSpec
from torchkiln.testing.specs.bias_act import BIAS_ACT
from torchkiln.testing.specs.pointwise import ADD

CPU = torch.device("cpu")
MEAN = next(spec for spec in SPECS if spec.name == "mean")
MULADD = next(spec for spec in SPECS if spec.name == "muladd")


@pytest.fixture(scope="module")
def trained() -> Outcome:
    """The outcome of 120 training steps."""
    *_, outcome = train_both(CPU, 120)
    return outcome


@pytest.fixture
def outcome(trained: Outcome) -> Outcome:
    """A copy, so that a test may change it."""
    return copy.deepcopy(trained)


def test_both_trainings_are_one(outcome: Outcome) -> None:
    assert outcome.agree
    assert len(outcome.runs[0].losses) == len(outcome.runs[1].losses) == outcome.total
    assert outcome.accuracy(outcome.runs[0]) > 0.8


def test_a_disagreement_is_seen(outcome: Outcome) -> None:
    outcome.runs[1].losses[7] += 0.1
    assert not outcome.agree


def test_a_training_that_does_not_learn_is_seen(outcome: Outcome) -> None:
    for run in outcome.runs:
        run.losses[:] = [1.0] * outcome.total
    assert not outcome.agree


def test_errors_of_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(a: Tensor, b: Tensor) -> Tensor:
        return torch.add(a, b) * 1.01

    broken = dataclasses.replace(ADD, op=wrong)
    monkeypatch.setattr(accuracy, "SPECS", (BIAS_ACT, broken))
    rows = list(accuracy.all_errors(CPU))
    assert len(rows) == 2 * 4 * 2
    for row in rows:
        assert (row.complaint is None) == (row.op != broken.name), row
        assert row.ours >= 0


@pytest.mark.parametrize("spec", [MULADD, MEAN], ids=lambda spec: spec.name)
def test_cancellation_and_mixed_dtypes_count_few_steps(
    spec: OpSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors near 0 are relative to the terms, those of two dtypes to the coarser one."""
    monkeypatch.setattr(accuracy, "SPECS", (spec,))
    for row in accuracy.all_errors(CPU):
        assert row.ours < 4, row
        assert row.torch < 4, row


def test_an_error_is_measured_in_steps_of_its_element() -> None:
    truth = torch.tensor([1.0, 1e-3, 0.0], dtype=torch.float64)
    terms = torch.tensor([1.0, 1e-3, 1.0], dtype=torch.float64)
    step = torch.finfo(torch.float32).eps
    for index, size in ((0, 1.0), (1, 1e-3), (2, 1.0)):
        found = truth.clone()
        found[index] += 2 * step * size
        steps = accuracy.steps(found, truth, terms, [torch.float32])
        assert steps == pytest.approx(2, rel=1e-6)
    infinite = truth.log()
    assert accuracy.steps(infinite, infinite, terms, [torch.float32]) == 0


def errors(dtype: torch.dtype, ours: float, complaint: str | None = None) -> accuracy.Errors:
    return accuracy.Errors("add", dtype, "forward", ours, 0.0, 5, complaint)


def test_the_worst_row_of_a_family() -> None:
    half, single = errors(torch.float16, 0.5), errors(torch.float32, 0.7)
    double = errors(torch.float64, 3.0)
    assert report.worst([half, single, double]) is single
    wrong = dataclasses.replace(double, complaint="wrong")
    assert report.worst([half, single, wrong]) is wrong


def test_speeds_are_rows_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SPECS", (BIAS_ACT, ADD))
    rows = list(speed.all_timings(CPU, (8, 16), 0.0))
    assert [(row.op, row.dtype) for row in rows] == [
        *(2 * [("bias_act", "float32")] + 2 * [("bias_act", "bfloat16")]),
        *(("add", "float32"), ("add", "bfloat16")),
    ]
    assert {row.shape for row in rows} == {(8, 16)}
    timed = [row for row in rows if isinstance(row, bench.Measurement)]
    assert all(set(row.times) == {"torchkiln", "eager"} for row in timed)
    assert {name: len(group) for name, group in speed.by_family(timed).items()} == {
        "bias_act": 4,
        "pointwise": 2,
    }


def test_a_call_without_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def op(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(speed, "SPECS", (dataclasses.replace(ADD, op=op),))
    rows = list(speed.all_timings(CPU, (8, 16), 0.0))
    assert len(rows) == 2
    assert all(isinstance(row, Skipped) for row in rows)


def test_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo prints stages with times, two lines per family, the picture, and further commands.

    Three ops suffice: the contract checks the errors of all, and nox -s demo runs the whole demo.
    """
    pytest.importorskip("matplotlib").use("Agg")
    few = (BIAS_ACT, ADD, MEAN)
    monkeypatch.setattr(accuracy, "SPECS", few)
    monkeypatch.setattr(speed, "SPECS", few)
    path = tmp_path / "demo.json"
    assert main(["--quick", f"--out={tmp_path}", f"--json={path}"]) == 0
    out = capsys.readouterr().out
    assert "every result agrees" in out
    for stage in ("1/4 errors", "2/4 speed", "3/4 training", "4/4 picture"):
        assert f"\n{stage}" in out
    assert out.count("  done in ") == 3
    assert len(out.splitlines()) <= 2 * len(few) + 56
    assert "torchkiln explain rms_norm" in out
    picture = tmp_path / "torchkiln-demo.png"
    assert picture.read_bytes()[1:4] == b"PNG"
    assert f"picture: {picture}" in out
    found = json.loads(path.read_text())
    assert found["wrong"] == []
    assert {row["op"] for row in found["errors"]} == {spec.name for spec in few}


def test_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """``--full`` prints a line per dtype and direction; without it, a summary."""
    rows = [errors(torch.float32, 0.5), errors(torch.float16, 0.25)]
    report.errors(rows, full=True)
    assert capsys.readouterr().out.count("forward") == 2
    report.errors(rows, full=False)
    out = capsys.readouterr().out
    assert "0.50" in out
    assert "0.25" not in out
    timed = [
        row for row in speed.all_timings(CPU, (8, 16), 0.0) if isinstance(row, bench.Measurement)
    ]
    report.timings(timed[:3], full=True)
    assert "Median time of one call" in capsys.readouterr().out
    report.timings(timed[:3], full=False)
    assert "geometric mean of each family" in capsys.readouterr().out
