"""The command line as a whole: help, errors, Ctrl-C and closed pipes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from importlib import import_module
from pathlib import Path

import pytest
import torch
from processes import forked

from torchkiln.bench import case, peers, plan, regression, result, runs
from torchkiln.cli import COMMANDS, bench_parser, main
from torchkiln.cli.options import DIRECTIONS, DTYPES, dtype_name, shape, write_whole
from torchkiln.cli.status import Status
from torchkiln.ops.names import ALIASES, FAMILIES, OPS
from torchkiln.testing import SPECS


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python process."""
    given = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "demo":
        pytest.importorskip("rich")
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert f"usage: torchkiln {name}" in capsys.readouterr().out


def test_the_page_has_all_commands_statuses_and_forms() -> None:
    """Names of forms are those of tests/data/json.txt, which another test compares with reports."""
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "cli.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)[ `]", page, re.MULTILINE)) >= set(COMMANDS)
    statuses = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    assert statuses == [str(status.value) for status in Status]
    forms = set(re.findall(r"^\| `(torchkiln\.[a-z-]+/\d+)`", page, re.MULTILINE))
    data = (root / "tests" / "data" / "json.txt").read_text(encoding="utf-8")
    assert forms == set(re.findall(r"^torchkiln\.[a-z-]+/\d+$", data, re.MULTILINE))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_run(name: str) -> None:
    if name == "demo":
        pytest.importorskip("rich")
        pytest.importorskip("matplotlib")
    module = import_module(COMMANDS[name].module)
    assert callable(module.run if COMMANDS[name].parser else module.main)


@pytest.mark.parametrize("words", ["", "--help", "--version", *(f"{c} --help" for c in COMMANDS)])
def test_help_does_not_wait_for_torch(words: str) -> None:
    code = (
        f"import sys; sys.argv = ['torchkiln', *{words.split()}]\n"
        "from torchkiln_command import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_usage_has_an_example_of_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert main([]) == 2
    assert capsys.readouterr().out == out
    for name, command in COMMANDS.items():
        assert f"\n  {name} " in out
        assert f"\n{'':13}{command.example}\n" in out
        assert command.example.startswith(f"torchkiln {name}")


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.parser])
def test_examples_are_parsed(name: str) -> None:
    command = COMMANDS[name]
    assert command.parser is not None
    command.parser(command.example.split()[2:])


@pytest.mark.parametrize("name", ["bench", "explain", "profile"])
def test_help_lists_the_ops(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    out = capsys.readouterr().out
    for family, ops in FAMILIES.items():
        listed = ", ".join("spmm" if op == "spmm_csr" else op for op in ops)
        assert f"\n  {family:<18}{listed}\n" in out
    assert "spmm and spmm_csr are one op" in out


def test_the_listed_ops_are_those_of_the_specs() -> None:
    assert sorted(OPS) == sorted(spec.name for spec in SPECS)
    assert set(ALIASES.values()) <= set(OPS)


def test_the_words_of_bench_are_those_of_its_records() -> None:
    """The parser repeats names of other modules, because importing those would import torch."""
    assert bench_parser.PEERS == peers.PEERS
    assert tuple(getattr(torch, name) for name in bench_parser.DEFAULT_DTYPES) == plan.DTYPES
    kinds = (result.CALLS, result.SWEEP, result.SMALL, result.HOST)
    found = bench_parser.bench([f"--{word}" for word in kinds])
    assert tuple(found.kinds) == kinds
    assert tuple(runs.DIRECTIONS) == DIRECTIONS
    assert runs.DIRECTIONS[found.direction] == (case.FORWARD, case.BACKWARD)
    assert set(bench_parser.REPORT_KINDS) < set(kinds)
    assert found.threshold == regression.THRESHOLD


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bnech"]) == 2
    expected = (
        "torchkiln: COMMAND: got 'bnech', expected one of bench, check-hub, demo, doctor, explain, "
    )
    assert (
        f"{expected}judge, new, profile, replace, watch; did you mean bench?"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("fp64", "float64"),
        ("double", "float64"),
        *((name, name) for name in DTYPES),
    ],
)
def test_names_of_dtypes(given: str, name: str) -> None:
    assert dtype_name(given) == name


def test_refused_values() -> None:
    with pytest.raises(ArgumentTypeError, match=r"got 'int8', expected one of float32 \(fp32, f"):
        dtype_name("int8")
    assert shape("3x5") == (3, 5)
    for wrong in ("4096", "0x4", "2x3x4", "4,4", "4x"):
        with pytest.raises(ArgumentTypeError, match="rows and columns of at least 1, such as 4096"):
            shape(wrong)


def test_as_a_module() -> None:
    """``python -m torchkiln --version`` imports no module that only other commands need."""
    code = (
        "import runpy, sys; sys.argv = ['torchkiln', '--version']\n"
        "try: runpy.run_module('torchkiln', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torchkiln.testing', 'torchkiln.bench', 'rich', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().count(".") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("explain add --device=cpu --shape=4x4 --json", "torchkiln.explain: --json: got "),
        ("profile add --device=cpu --shape=4x4 --json", "torchkiln.profile: --json: got "),
        ("bench add --device=cpu --json", "torchkiln.bench: --json: got "),
        ("bench add --device=cpu --out", "torchkiln.bench: --out: got "),
        ("doctor --json", "torchkiln.doctor: --json: got "),
        ("replace torch.nn:ReLU --json", "torchkiln.replace: --json: got "),
        ("demo --json", "torchkiln.demo: --json: got "),
        ("demo --out", "torchkiln.demo: --out: got "),
        ("new mine --out", "torchkiln.new: --out: got "),
    ],
)
def test_an_output_that_cannot_be_written(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words.startswith("demo"):
        pytest.importorskip("rich")
        pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "below"
    path = place if words.endswith("out") else place / "x.json"
    assert main([*words.split(), str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "expected a f" in error


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("torchkiln.cli.explain"), "run", interrupt)
    assert main(["explain", "add"]) == 130
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_while_torch_is_imported() -> None:
    code = """
import sys, time
from torchkiln_command import main

class Slow:
    def find_spec(self, name, *_):
        if name == "torch":
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
sys.argv = ["torchkiln", "explain", "add"]
sys.exit(main())
"""
    given = [sys.executable, "-c", code]
    with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("words", ["--help", "explain --help", "doctor"])
def test_a_closed_pipe(words: str) -> None:
    """Exit status 141 and no error if the reader of the output is gone, as with ``| head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    given = [sys.executable, "-W", "ignore", "-m", "torchkiln_command", *words.split()]
    done = subprocess.run(
        given, stdout=writer, stderr=subprocess.PIPE, env=environment, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("output", ["--json={}/bench.json", "--out={}"])
def test_a_full_disk_leaves_the_old_output(output: str, tmp_path: Path) -> None:
    """Writing fails after 10 bytes, and the file of an earlier run is unchanged."""
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from torchkiln.bench import __main__ as command\n"
        "from torchkiln.bench.result import Record\n"
        "from torchkiln.testing.environment import environment\n"
        "from torchkiln.cli import bench_parser\n"
        "import torch\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "record = Record(environment(torch.device('cpu')), ())\n"
        "before = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))\n"
        "try: command.write(bench_parser.bench([sys.argv[1]]), record)\n"
        "finally: resource.setrlimit(resource.RLIMIT_FSIZE, before)\n"
    )
    path = tmp_path / "bench.json"
    path.write_text("the old results, which are longer than 10 bytes")
    assert "File too large" in forked(code, output.format(tmp_path)).stderr
    assert path.read_text() == "the old results, which are longer than 10 bytes"
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_whole(link, "new\r\n")
    assert link.is_symlink()
    target.chmod(0o640)
    write_whole(link, "newer\r\n")
    assert target.read_bytes() == b"newer\r\n"
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_a_pipe_is_written() -> None:
    """As /dev/stdout, a pipe has a name that no file can replace."""
    reader, writer = os.pipe()
    write_whole(Path(f"/dev/fd/{writer}"), "to a pipe")
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"to a pipe"
