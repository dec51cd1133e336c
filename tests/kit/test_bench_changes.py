"""Comparison of two runs: slower ops are reported, differences within the noise are not."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torchkiln import bench
from torchkiln.bench import __main__ as command
from torchkiln.bench import case as case_module
from torchkiln.bench import clock, measure
from torchkiln.bench.case import cases
from torchkiln.bench.clock import FEWEST, Times, cpu_clock, in_turns
from torchkiln.bench.measure import Settings, time_case
from torchkiln.bench.plan import Plan
from torchkiln.bench.regression import changes
from torchkiln.bench.result import OURS, Skipped
from torchkiln.testing import OpSpec
from torchkiln.testing.environment import environment
from torchkiln.testing.specs.pointwise import ADD

CPU = torch.device("cpu")


def times(seconds: float, spread: float = 0.02) -> Times:
    return Times(seconds, seconds * (1 - spread / 2), seconds * (1 + spread / 2), 50)


@pytest.fixture(scope="module")
def row() -> bench.Measurement:
    case = next(cases(ADD, CPU, torch.float32, (8, 16)))
    found = time_case(case, "forward", Settings(cpu_clock, ("eager",), 0.0), 1)
    assert found is not None
    return found


def record(
    row: bench.Measurement, ours: float, ceiling: float = 1.0, spread: float = 0.02
) -> bench.Record:
    """A run with one row of these times, in seconds."""
    changed = dataclasses.replace(
        row,
        times={**row.times, OURS: times(ours, spread)},
        references={"copy": times(ceiling)},
    )
    return bench.Record(environment(CPU), (changed,))


@pytest.mark.parametrize(
    ("old", "new", "ceiling", "spread", "verdict"),
    [
        (1.0, 1.2, 1.0, 0.02, "slower"),
        (1.0, 0.8, 1.0, 0.02, "faster"),
        (1.0, 1.04, 1.0, 0.02, ""),  # below the threshold
        (1.0, 1.2, 1.0, 0.40, ""),  # within the noise
        (1.0, 1.2, 1.2, 0.02, ""),  # the device has become slower, too
        (1.0, 1.0, 0.8, 0.02, ""),  # the device has become faster, the op has not changed
    ],
)
def test_what_counts_as_a_change(
    row: bench.Measurement,
    old: float,
    new: float,
    ceiling: float,
    spread: float,
    verdict: str,
) -> None:
    found = changes(record(row, old), record(row, new, ceiling, spread))
    assert len(found.regressions) == (verdict == "slower")
    assert len(found.improvements) == (verdict == "faster")
    assert [line[-1] for line in found.table().rows] == ([verdict] if verdict else [])


def test_rows_are_matched_by_what_they_measure(row: bench.Measurement) -> None:
    old, new = record(row, 1.0), record(row, 1.0)
    other = dataclasses.replace(new.rows[0], shape=(4, 4))
    found = changes(old, dataclasses.replace(new, rows=(other,)))
    assert found.rows == ()
    assert found.gone == old.rows
    assert "1 rows of the old run were not measured" in str(found)


def test_another_machine_is_named(row: bench.Measurement) -> None:
    old = record(row, 1.0)
    elsewhere = dataclasses.replace(old.environment, device="another one")
    found = changes(dataclasses.replace(old, environment=elsewhere), record(row, 1.0))
    assert "device was another one" in str(found)


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """An op that takes 4 ms and the number of seconds in the returned list.

    The clock is set forward by this time: a sleep on a busy machine lasts longer than it says.
    """
    delay, passed = [0.0], [0.0]

    def op(a: Tensor, b: Tensor) -> Tensor:
        passed[0] += 0.004 + delay[0]
        return torch.add(a, b)

    ahead = SimpleNamespace(perf_counter=lambda: time.perf_counter() + passed[0])
    monkeypatch.setattr(clock, "time", ahead)

    def find(*_: str) -> OpSpec:
        return dataclasses.replace(ADD, op=op)

    monkeypatch.setattr(case_module, "find", find)
    return delay


def test_a_slowed_op_is_caught(
    tmp_path: Path, slowed: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    given = [
        "add",
        "--device=cpu",
        "--shape=64x64",
        "--dtype=float32",
        "--direction=forward",
        "--threads=1",
    ]
    given.append("--peers=eager")
    assert command.main([*given, f"--json={old}"]) == 0
    slowed[0] = 0.08
    compare = [f"--compare={old}", "--threshold=50"]
    assert command.main([*given, *compare, f"--json={new}"]) == 1
    assert "1 slower and 0 faster by more than 50%" in capsys.readouterr().out
    # --read compares two files without a run, here also with old and new exchanged.
    assert command.main([f"--read={new}", *compare]) == 1
    assert command.main([f"--read={old}", f"--compare={new}", "--threshold=50"]) == 0
    assert "0 slower and 1 faster" in capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--compare", "--read"])
@pytest.mark.parametrize("content", [None, "no json", "{}"])
def test_a_file_that_is_none(
    argument: str, content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    assert command.main(["--device=cpu", f"{argument}={path}"]) == 2
    assert f"torchkiln.bench: {argument}: got {path}" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def op(a: Tensor, b: Tensor) -> Tensor:
        if a.shape[0] == 4:
            raise KeyboardInterrupt
        return torch.add(a, b)

    monkeypatch.setattr(case_module, "find", lambda *_: dataclasses.replace(ADD, op=op))

    # Few rounds make the row short, so that even a busy machine stays within the limit.
    monkeypatch.setattr(measure, "in_turns", functools.partial(in_turns, rounds=FEWEST))
    path = tmp_path / "b.json"
    given = [
        "add",
        "--device=cpu",
        "--dtype=float32",
        "--direction=forward",
        "--peers=eager",
        "--within=30",
    ]
    status = command.main([*given, "--shape=2x2", "--shape=4x4", f"--json={path}"])
    assert status == 130
    assert "stopped: " in capsys.readouterr().err
    assert [row.shape for row in bench.Record.read(path).rows] == [(2, 2)]


def test_out_of_memory_and_refused_shapes_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.json"
    given = ["add", "--device=cpu", "--dtype=float32", "--direction=forward", "--peers=eager"]
    shapes = ["--shape=99999999x9999999", "--shape=4x4"]
    assert command.main([*given, *shapes, f"--json={path}"]) == 0
    out = capsys.readouterr().out
    assert "skipped add float32 99999999 x 9999999 calls: out of memory\n" in out
    found = bench.Record.read(path)
    assert [r.shape for r in found.rows] == [(4, 4)]
    assert [s.shape for s in found.skipped] == [(99999999, 9999999)]

    assert command.main([*given, shapes[0]]) == 1  # no row was measured


def test_what_an_op_refuses_is_skipped() -> None:
    def op(*_: Tensor) -> Tensor:
        raise RuntimeError("torchkiln.add: a: got 3 columns, expected 4")

    chosen = Plan(
        (dataclasses.replace(ADD, op=op),),
        CPU,
        Settings(cpu_clock, ("eager",), 0.0),
        shapes=((2, 3),),
        dtypes=(torch.float32,),
        directions=("forward",),
    )
    (skipped,) = [entry for _, found in chosen.pieces() for entry in found]
    assert isinstance(skipped, Skipped)
    assert skipped.reason == "torchkiln.add: a: got 3 columns, expected 4"

    def broken(*_: Tensor) -> Tensor:
        raise RuntimeError("wrong")

    chosen = dataclasses.replace(chosen, specs=(dataclasses.replace(ADD, op=broken),))
    with pytest.raises(RuntimeError, match="wrong"):
        list(chosen.pieces()[0][1])
