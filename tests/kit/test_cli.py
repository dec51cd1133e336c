"""The command that has all others."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from torchkiln.cli import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "demo":
        pytest.importorskip("rich")
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert f"usage: torchkiln {name}" in capsys.readouterr().out
    assert callable(import_module(COMMANDS[name][0]).main)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bnech"]) == 2
    expected = "torchkiln: COMMAND: got 'bnech', expected one of bench, demo, doctor, explain, "
    assert f"{expected}new, profile, watch; did you mean bench?" in capsys.readouterr().err


def test_as_a_module() -> None:
    """And without what only some commands need."""
    code = (
        "import runpy, sys; sys.argv = ['torchkiln', '--version']\n"
        "try: runpy.run_module('torchkiln', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torchkiln.testing', 'torchkiln.bench', 'rich', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().count(".") == 2
