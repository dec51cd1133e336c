"""The benchmark records the load of the machine and marks noisy rows."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchkiln import bench
from torchkiln.bench import clock, report
from torchkiln.bench.__main__ import sentence
from torchkiln.bench.case import cases
from torchkiln.bench.clock import Load, LoadMeter, Times
from torchkiln.bench.report import markdown, tables
from torchkiln.bench.result import OURS, Skipped
from torchkiln.testing.environment import environment
from torchkiln.testing.specs.pointwise import ADD

CPU = torch.device("cpu")
QUIET, LOUD = Times(1.0, 0.99, 1.01, 50), Times(1.0, 0.9, 1.1, 50)


def row(ours: Times, eager: Times, kind: str = "calls") -> bench.Measurement:
    case = next(cases(ADD, CPU, torch.float32, (8, 16)))
    times = {OURS: ours, "eager": eager}
    return bench.Measurement.of(kind, case, "forward", times, references=(), missing={})


@pytest.mark.parametrize(
    ("ours", "eager", "kind", "noisy"),
    [
        (QUIET, QUIET, "calls", False),
        (LOUD, QUIET, "calls", True),
        (QUIET, LOUD, "calls", True),
        (LOUD, QUIET, "host", False),
    ],
)
def test_noisy_rows_are_marked(ours: Times, eager: Times, kind: str, noisy: bool) -> None:
    found = row(ours, eager, kind)
    assert found.is_noisy == found.as_dict()["is_noisy"] == noisy
    assert sentence(found).endswith(" !") == noisy
    (table,) = tables([found])
    spread = table.rows[0][table.headings.index("spread")]
    assert spread.startswith("! ") == noisy
    record = bench.Record(environment(CPU), (found, row(QUIET, QUIET)))
    assert any("1 of 2 rows are marked !" in words for words in record.warnings()) == noisy
    assert ("marked !" in markdown(record)) == noisy


def test_a_busy_machine_is_named(tmp_path: Path) -> None:
    record = bench.Record(environment(CPU), (row(QUIET, QUIET),), load=Load(2, 1.4))
    words = "busy machine: others used 1.4 of 2 CPU cores during the run"
    assert record.warnings() == [words]
    assert words in markdown(record)
    path = tmp_path / "b.json"
    record.write(path)
    assert bench.Record.read(path) == record
    assert dataclasses.replace(record, load=Load(2, 0.1)).warnings() == []
    assert "the GPU 90% before" in str(Load(64, 0.1, 0.9))
    assert Load(64, 0.1, 0.9).is_busy


@pytest.mark.parametrize("length", [0.4, 2.0])
def test_the_load_is_that_of_others(monkeypatch: pytest.MonkeyPatch, length: float) -> None:
    """The load is seconds of others per second, also over the shortest span that is measured."""
    seconds, now = iter([100.0, 100.0 + 1.5 * length]), iter([7.0, 7.0 + length])
    monkeypatch.setattr(clock, "seconds_of_others", lambda: next(seconds))
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    load = LoadMeter(CPU).read()
    assert load is not None
    assert load.others == 1.5


def test_no_load_of_a_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([7.0, 7.0 + 0.9 * clock.SHORTEST_LOAD])
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    assert LoadMeter(CPU).read() is None


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="counts ticks in /proc")
def test_our_own_processes_are_not_others() -> None:
    """The CPU time of a compiler that we have started counts as ours while it runs."""
    before = clock.own_ticks()
    busy = (
        "import sys, time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        used = (clock.own_ticks() - before) / os.sysconf("SC_CLK_TCK")
        child.kill()
    assert used >= 0.4
    assert clock.seconds_of_others() is not None


def test_skips_with_one_reason_share_a_line() -> None:
    entries = [
        Skipped("calls", "add", "float32", (4, 4), direction, "no memory")
        for direction in ("forward", "backward")
    ]
    other = Skipped("calls", "add", "float32", None, None, "refused")
    assert report.skips([*entries, other]) == [
        "skipped add float32 4 x 4 forward calls, add float32 4 x 4 backward calls: no memory",
        "skipped add float32 calls: refused",
    ]
