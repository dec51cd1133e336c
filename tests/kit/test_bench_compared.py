"""Benchmarks of any two functions, limits of the time of a run, and pictures."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln import bench
from torchkiln.bench import __main__ as command
from torchkiln.bench import comparison, measure
from torchkiln.bench.budget import LEAST, Budget
from torchkiln.bench.clock import FEWEST, Times, cpu_clock, in_turns
from torchkiln.bench.measure import Settings
from torchkiln.bench.result import OURS

CPU = torch.device("cpu")


def slow(x: Tensor) -> Tensor:
    time.sleep(0.01)
    return F.silu(x)


def test_two_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "SECONDS", 0.0)
    x = torch.randn(64, 64)
    found = bench.compare(F.silu, slow, x)
    assert found.names == ("silu", "slow")
    assert found.bytes == 2 * 64 * 64 * 4
    assert found.speedup > 1
    assert found.is_certain
    assert found.ceiling > 0
    assert "silu is " in str(found)
    assert repr(found) == str(found)
    assert json.loads(found.to_json())["speedup"] == found.speedup
    console = pytest.importorskip("rich.console").Console(width=200)
    with console.capture() as captured:
        console.print(found)
    assert "of ceiling" in captured.get()


def test_the_same_name_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "SECONDS", 0.0)
    found = bench.compare(F.silu, torch.nn.functional.silu, torch.randn(8))
    name = "torch.nn.functional.silu"
    assert found.names == (name, f"{name} (baseline)")
    found = bench.compare(torchkiln.silu, F.silu, torch.randn(8))
    assert found.names == ("torchkiln.silu", name)
    same = dataclasses.replace(found, times=(found.times[0], found.times[0]))
    assert "which may be noise" in str(same)


def test_functions_of_no_tensor() -> None:
    with pytest.raises(ValueError, match=r"torchkiln\.bench\.compare: args: got no tensor, e"):
        bench.compare(slow, slow, 3)


def test_a_budget_shares_the_time() -> None:
    now = 0.0
    budget = Budget(100.0, rows=20, now=lambda: now)
    budget.begin(10)
    assert budget.end_of_piece == 50.0
    usual = Settings(cpu_clock, ("eager", "compile"), budget=3.0)
    first = budget.settings(usual, first=True)
    assert first.peers == usual.peers
    assert first.budget == 3.0
    assert first.left_out == {}
    now = 45.5
    later = budget.settings(usual, first=False)
    assert later.peers == ("eager",)
    assert later.left_out == {"compile": "left out, to be done within 1.67 minutes"}
    assert later.budget == pytest.approx(4.5 / 9 - 0.3)
    budget.took(5.0, later)  # rows take longer than estimated
    assert budget.settings(usual, first=False).budget < later.budget
    now = 60.0  # this piece has used up its share
    assert budget.settings(usual, first=False).budget == LEAST
    budget.begin(10)
    assert budget.end_of_piece == 100.0
    now = 99.9
    assert budget.settings(usual, first=False).budget == LEAST
    assert not budget.is_over()
    assert budget.settings(usual, first=True).peers == ("eager",)  # too late to compile a peer
    now = 100.0
    assert budget.is_over()


def test_no_limit_changes_nothing() -> None:
    usual = Settings(cpu_clock)
    assert Budget().settings(usual, first=False) is usual
    assert not Budget().is_over()


def test_rows_without_time_are_named(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    given = ["add", "square", "--device=cpu", "--dtype=float32", "--shape=4x4", "--peers=eager"]
    assert command.main([*given, "--within=0.0000001", f"--json={path}"]) == 1
    record = bench.Record.read(path)
    assert record.rows == ()
    assert {entry.reason for entry in record.skipped} == {"no time is left of what --within gives"}


def test_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--report`` writes all formats and the pictures."""
    pytest.importorskip("matplotlib")
    # Few rounds make rows short, so that all of them fit into the limit on a busy machine.
    monkeypatch.setattr(measure, "in_turns", functools.partial(in_turns, rounds=FEWEST))
    given = ["bias_act", "--device=cpu", "--shape=8x16", "--peers=eager", "--within=30"]
    assert command.main([*given, "--report", f"--out={tmp_path}"]) == 0
    record = bench.Record.read(tmp_path / "bench.json")
    calls = [row for row in record.rows if row.kind == "calls"]
    assert {row.dtype for row in calls} == {"float32", "bfloat16"}
    assert {row.dtype for row in record.rows if row.kind == "host"} == {"bfloat16"}
    assert not [row for row in record.rows if row.kind == "sweep"]  # a report has no sweep
    for name in ("share", "speedups", "host"):
        assert (tmp_path / f"bench-{name}.png").read_bytes()[1:4] == b"PNG"
    assert (tmp_path / "bench.md").is_file()
    slower = [
        dataclasses.replace(row, times={**row.times, OURS: Times(9.0, 9.0, 9.0, 9)})
        for row in record.rows
    ]
    sizes = {row.shape for row in record.rows if row.kind == "calls"}
    assert sizes == {(8, 16)}
    old = tmp_path / "old.json"
    dataclasses.replace(record, rows=tuple(slower)).write(old)
    assert command.main([f"--read={tmp_path / 'bench.json'}", f"--compare={old}"]) == 0
    out = capsys.readouterr().out
    assert "Changes since the old run" in out
    assert "faster" in out
