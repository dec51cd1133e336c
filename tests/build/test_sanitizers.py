"""Runs under a sanitizer end with pytest's status."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from run_sanitizers import PYTEST

TEST = """
import atexit, os
atexit.register(os._exit, 7)
def test_one(): assert {}
"""


@pytest.mark.parametrize("passes", [True, False])
def test_a_process_ends_after_its_checks(passes: bool, tmp_path: Path) -> None:
    """The process ends at once with pytest's status: a thread of torch may fail in a shutdown."""
    (tmp_path / "test_one.py").write_text(TEST.format(passes))
    command = (*PYTEST, "-q", "-p", "no:cacheprovider", "test_one.py")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == int(not passes), done.stderr
    assert ("1 passed" if passes else "1 failed") in done.stdout
