"""The demo agrees with itself, and says so when it does not."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchkiln.demo import accuracy, speed
from torchkiln.demo.train import Outcome, train_both
from torchkiln.testing.specs.bias_act import BIAS_ACT
from torchkiln.testing.specs.pointwise import ADD

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained() -> Outcome:
    """How a short training ends."""
    *_, outcome = train_both(CPU, quick=True)
    return outcome


@pytest.fixture
def outcome(trained: Outcome) -> Outcome:
    """A copy that a test may spoil."""
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
    rows = accuracy.all_errors(CPU)
    assert len(rows) == 2 * 4 * 2
    for row in rows:
        assert (row.complaint is None) == (row.op != broken.name), row
        assert row.ours >= 0


def test_speeds_are_rows_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "default_shape", lambda _: (8, 16))
    monkeypatch.setattr(speed, "SPECS", (BIAS_ACT,))
    rows = [row for quick in (True, False) for row in speed.all_timings(CPU, quick=quick)]
    assert {row.op for row in rows} == {BIAS_ACT.name}
    assert {row.dtype for row in rows} == {"float32", "bfloat16"}
    assert {row.shape for row in rows} == {(1024, 1024), (8, 16)}
    assert all(set(row.times) == {"torchkiln", "eager"} for row in rows)


def test_the_whole(tmp_path: Path) -> None:
    for package in ("rich", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "torchkiln.demo", "--quick", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every result agrees" in done.stdout
    assert (tmp_path / "torchkiln-demo.png").read_bytes()[1:4] == b"PNG"
