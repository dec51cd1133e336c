"""The benchmark's command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from torchkiln import bench
from torchkiln.bench import __main__ as command
from torchkiln.bench import plan, report
from torchkiln.cli import bench_parser
from torchkiln.testing import SPECS

CPU = torch.device("cpu")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["--json", str(tmp_path / "b.json"), "--markdown", str(tmp_path / "b.md")]
    choices = ["--device=cpu", "--shape=8x16", "--peers=eager", "--threads=1,2", "--dtype=float32"]
    assert command.main(["add", "--forward", *choices, *outputs]) == 0
    out, err = capsys.readouterr()
    assert "add" in out
    assert "[1/1] add float32 forward: " in err
    record = bench.Record.read(tmp_path / "b.json")
    assert [(r.op, r.direction, r.threads) for r in record.rows] == [
        *(("add", "forward", 1), ("add", "forward", 2))
    ]
    assert (tmp_path / "b.md").read_text() == bench.markdown(record)


def test_a_closed_pipe_loses_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rich ends the process when the reader of its output is gone."""

    def end(_: object) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(report, "show", end)
    given = ["add", "--device=cpu", "--shape=8x16", "--peers=eager", "--forward", "--dtype=fp32"]
    with pytest.raises(SystemExit):
        command.main([*given, f"--json={tmp_path / 'b.json'}"])
    assert len(bench.Record.read(tmp_path / "b.json").rows) == 1


def test_what_the_command_takes_when_nothing_is_said() -> None:
    chosen = command.plan(bench_parser.bench(["--device=cpu"]))
    assert chosen.specs == tuple(SPECS)
    assert chosen.shapes == ()
    assert chosen.settings.gauge is None
    assert chosen.directions == ("forward", "backward")
    assert chosen.kinds == ("calls",)
    assert chosen.threads == (torch.get_num_threads(),)
    assert len(chosen.pieces()) == 2 * len(SPECS)


def test_the_ops_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from dataclasses import replace\nfrom torchkiln.testing import SPECS as OURS\n"
    (tmp_path / "theirs.py").write_text(f"{source}SPECS = (replace(OURS[0], name='theirs'),)\n")
    (tmp_path / "nothing.py").write_text("SPECS = (1,)\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Named like a module of Python's own.
    (tmp_path / "json.py").write_text((tmp_path / "theirs.py").read_text())
    by_file = command.plan(bench_parser.bench(["--device=cpu", f"--specs={tmp_path / 'json.py'}"]))
    assert [spec.name for spec in by_file.specs] == ["theirs"]
    monkeypatch.chdir(tmp_path)
    chosen = command.plan(bench_parser.bench(["--device=cpu", "--specs=theirs"]))
    assert [spec.name for spec in chosen.specs] == ["theirs"]
    (tmp_path / "json.py").unlink()
    for wrong in ("nothing", "not_there", "not_there.py"):
        with pytest.raises(ValueError, match=f"--specs: got '{wrong}'"):
            command.plan(bench_parser.bench(["--device=cpu", f"--specs={wrong}"]))
    with pytest.raises(ValueError, match="OP: got 'add', expected one of theirs"):
        command.plan(bench_parser.bench(["add", "--device=cpu", "--specs=theirs"]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["added"], "torchkiln.bench: OP: got 'added', expected one of "),
        (["softmx"], "did you mean softmax or log_softmax?"),
        (["--device=cpu", "--small"], "torchkiln.bench: --small: got device cpu, expected a GPU"),
        (["--device=cpu", "--memory"], "torchkiln.bench: --memory: got device cpu, expected a GPU"),
    ],
)
def test_a_refused_command(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--shape=4096", "--shape: got '4096', expected rows and columns of at least 1, such as"),
        ("--dtype=int8", "--dtype: got 'int8', expected one of float32 (fp32, float), float64 ("),
        ("--within=never", "--within: got 'never', expected a number above 0"),
        ("--threads=0", "--threads: got '0', expected numbers, such as 1,2"),
        (
            "--peers=best",
            "--peers: got 'best', expected one of eager, compile, liger, quack, cudnn",
        ),
    ],
)
def test_a_malformed_command(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.main([given])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_picture_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_parser, "find_spec", lambda _: None)
    assert command.main(["--device=cpu", "--sweep", "--plot=a.png"]) == 2
    said = capsys.readouterr().err
    assert "--plot: got no module matplotlib" in said
    assert "pip install 'torchkiln[cli]'" in said


@pytest.mark.parametrize("name", ["json", "markdown", "plot"])
def test_an_output_in_no_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything is measured."""
    if name == "plot":
        pytest.importorskip("matplotlib")
    path = tmp_path / "folder" / "b.out"
    assert command.main(["add", "--device=cpu", f"--{name}={path}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"torchkiln.bench: --{name}: got {path}, expected a file in a folder that exists" in err
    assert f"type: mkdir -p {path.parent}" in err
    assert not path.parent.exists()


def test_an_output_that_is_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["add", "--device=cpu", f"--json={tmp_path}"]) == 2
    assert f"--json: got {tmp_path}, expected a file that can be written" in capsys.readouterr().err


def test_a_skip_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """All calls that are skipped for one reason have one line."""
    given = ["add", "--device=cpu", "--dtype=float32", "--peers=eager", "--within=0.0000001"]
    assert command.main([*given, "--shape=4x4", "--shape=8x8"]) == 1
    out, err = capsys.readouterr()
    calls = "add float32 4 x 4 calls, add float32 8 x 8 calls"
    assert f"skipped {calls}: no time is left of what --within gives" in out
    assert (out + err).count("no time is left") == 1


def test_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "default_device", lambda: CPU)
    assert command.main(["--device=cuda"]) == 2
    assert "torchkiln.bench: --device: got cuda, expected a GPU" in capsys.readouterr().err
