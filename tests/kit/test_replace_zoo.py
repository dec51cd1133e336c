"""``torchkiln.replace`` and ``torchkiln.fuse`` never change what a model computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from replace_zoo.cases import CASES


@pytest.mark.rotates("name", 3)
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_changed_model_computes_the_same(name: str) -> None:
    """Values, gradients, strides, dtypes, effects and random states; and the way back."""
    if CASES[name].alone:
        command = [sys.executable, "-m", "replace_zoo", name]
        ran = subprocess.run(
            command, cwd=Path(__file__).parent, check=False, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        return
    problems = CASES[name].problems()
    assert not problems, f"{len(problems)}: " + "\n".join(problems[:5])
