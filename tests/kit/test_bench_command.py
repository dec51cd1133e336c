"""The benchmark's command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchkiln import bench
from torchkiln.bench import __main__ as command
from torchkiln.bench import plan, report
from torchkiln.bench.budget import Budget
from torchkiln.bench.report import markdown
from torchkiln.cli import bench_parser
from torchkiln.cli.status import Status
from torchkiln.patch.compiled.choice import timed
from torchkiln.testing import SPECS

CPU = torch.device("cpu")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["--json", str(tmp_path / "b.json"), "--out", str(tmp_path / "folder")]
    choices = ["--device=cpu", "--shape=8x16", "--peers=eager", "--threads=1,2", "--dtype=float32"]
    assert command.main(["add", "--direction=forward", *choices, *outputs]) == 0
    out, err = capsys.readouterr()
    assert "add" in out
    assert "[1/1] add float32 forward: " in err
    record = bench.Record.read(tmp_path / "b.json")
    assert [(r.op, r.direction, r.threads) for r in record.rows] == [
        *(("add", "forward", 1), ("add", "forward", 2))
    ]
    assert (tmp_path / "folder" / "bench.md").read_text() == markdown(record)
    assert bench.Record.read(tmp_path / "folder" / "bench.json") == record


def test_a_closed_pipe_loses_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written although rich exits when the reader of its output has closed the pipe."""

    def end(_: object) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(report, "show", end)
    given = ["add", "--device=cpu", "--shape=8x16", "--peers=eager", "--direction=forward"]
    given.append("--dtype=fp32")
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
    # The user's file has the name of a module of Python.
    (tmp_path / "json.py").write_text((tmp_path / "theirs.py").read_text())
    by_file = command.plan(bench_parser.bench(["--device=cpu", f"--specs={tmp_path / 'json.py'}"]))
    assert [spec.name for spec in by_file.specs] == ["theirs"]
    monkeypatch.chdir(tmp_path)
    chosen = command.plan(bench_parser.bench(["--device=cpu", "--specs=theirs"]))
    assert [spec.name for spec in chosen.specs] == ["theirs"]
    (tmp_path / "json.py").unlink()
    (tmp_path / "raises.py").write_text("raise RuntimeError('one line\\nand another')\n")
    for wrong in ("nothing", "not_there", "not_there.py", "raises"):
        with pytest.raises(ValueError, match=f"--specs: got '{wrong}'"):
            command.plan(bench_parser.bench(["--device=cpu", f"--specs={wrong}"]))
    with pytest.raises(ValueError, match="OP: got 'add', expected one of theirs"):
        command.plan(bench_parser.bench(["add", "--device=cpu", "--specs=theirs"]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["added"], "torchkiln.bench: OP: got 'added' (did you mean add?), expected one of "),
        (["addcmul"], "OP: got 'addcmul' (its kernels are those of muladd), expected one of "),
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
            "--peers: got 'best', expected one of eager, compile, liger, quack, cudnn, torchao,",
        ),
    ],
)
def test_a_malformed_command(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.main([given])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"device": CPU, "shapes": [(8, 16)], "peers": ["eager"]}
    given["dtypes"] = [torch.float32]
    record = bench.run("muladd", **given, direction="backward")
    assert [(row.op, row.direction) for row in record.rows] == [("muladd", "backward")]
    assert set(record.rows[0].times) == {"torchkiln", "eager"}
    with pytest.raises(
        ValueError, match=r"torchkiln\.bench: OP: got 'mulad' \(did you mean muladd\?\)"
    ):
        bench.run("mulad")

    def stop(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Budget, "is_over", stop)
    with pytest.raises(KeyboardInterrupt):  # run() does not return an incomplete record
        bench.run("add", **given)


def test_json_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["add", "--device=cpu", "--shape=8x16", "--peers=eager", "--direction=forward"]
    assert command.main([*given, "--dtype=fp32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "torchkiln.bench/1"
    assert [row["op"] for row in found["rows"]] == ["add"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit):  # an op is no name of a file
        command.main(["--json", "add"])
    assert "--json: got 'add', expected a name that ends in .json" in capsys.readouterr().err


def test_a_folder_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    given = ["add", "--device=cpu", "--shape=8x16", "--peers=eager", "--dtype=fp32"]
    assert command.main([*given, f"--out={tmp_path}"]) == 0
    assert "pip install 'torchkiln[cli]'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]


@pytest.mark.parametrize("option", ["--json", "--compile"])
def test_an_output_that_is_a_folder(
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "measure", None)
    path = tmp_path / "folder.json"
    path.mkdir()
    assert command.main(["add", "--device=cpu", f"{option}={path}"]) == 2
    assert f"{option}: got {path}, expected a file that can be written" in capsys.readouterr().err


def test_the_table_of_a_record(tmp_path: Path) -> None:
    record, table = tmp_path / "bench.json", tmp_path / "table.json"
    given = ["silu", "--device=cpu", "--shape=8x16", "--peers=compile", "--dtype=fp32"]
    assert command.main([*given, f"--json={record}"]) == 0
    assert command.main([f"--read={record}", f"--compile={table}"]) == 0
    found = timed(table, "silu", torch.empty(8, 16))
    assert found is not None
    assert found.columns == 16


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--peers=eager"], "--peers: got eager, expected compile: --compile writes the times"),
        (["--direction=forward"], "--direction: got forward, expected both: --compile writes"),
        (["--host"], "--host: got it alone, expected --calls beside it: --compile writes"),
    ],
)
def test_a_run_without_the_times_of_a_table(
    given: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "measure", None)
    table = tmp_path / "table.json"
    assert command.main(["silu", "--device=cpu", f"--compile={table}", *given]) == 2
    assert words in capsys.readouterr().err
    assert not table.exists()


def test_a_record_without_the_times_of_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, table = tmp_path / "bench.json", tmp_path / "table.json"
    given = ["silu", "--device=cpu", "--shape=8x16", "--peers=eager", "--dtype=fp32"]
    assert command.main([*given, f"--json={record}"]) == 0
    assert command.main([f"--read={record}", f"--compile={table}"]) == 2
    assert "--compile: got a run without large calls" in capsys.readouterr().err
    assert not table.exists()


def test_a_table_has_rows_of_all_dtypes_that_models_are_trained_in(tmp_path: Path) -> None:
    record, table = tmp_path / "bench.json", tmp_path / "table.json"
    given = ["tanh", "--device=cpu", "--shape=8x16", f"--json={record}", f"--compile={table}"]
    assert command.main(given) == 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert timed(table, "tanh", torch.empty(8, 16, dtype=dtype)) is not None


def test_a_skip_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Calls that are skipped for the same reason are listed in one line."""
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
    assert command.main(["--device=cuda"]) == Status.CANNOT_RUN
    assert "torchkiln.bench: --device: got cuda, expected a GPU" in capsys.readouterr().err


def test_one_of_several_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(plan, "default_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    chosen = [plan.device_of("here", name) for name in ("cuda", "cuda:1")]
    assert chosen == current == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert plan.device_of("here", None) == torch.device("cuda:0")
    assert command.main(["--device=cuda:2"]) == Status.CANNOT_RUN
    assert (
        "--device: got cuda:2, expected an index below 2, the number of GPUs"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        command.main(["--device=gpu"])
    assert "got 'gpu', expected cpu, cuda or cuda:N" in capsys.readouterr().err
