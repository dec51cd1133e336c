"""Type information: the stub of the extension, and the literal values of options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from torchkiln import typing
from torchkiln.testing import SPECS
from torchkiln.testing.specs.activation import FORMULAS


def test_the_stub_is_that_of_the_extension(tmp_path: Path) -> None:
    """The stub agrees with the extension; its ``__getattr__`` covers the ops.

    This is a test because the lint session, which checks all other types, has no built extension.
    """
    pytest.importorskip("mypy")
    allowed = tmp_path / "allowed"
    allowed.write_text("torchkiln._C.Watch\n")  # pybind11's metaclass
    words = ("torchkiln._C", "--ignore-missing-stub", "--allowlist", str(allowed))
    command = [sys.executable, "-W", "ignore", "-m", "mypy.stubtest", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_words_are_those_of_the_ops() -> None:
    assert set(get_args(typing.Activation)) == set(FORMULAS)
    words = {spec.name: spec.refusals.words for spec in SPECS if spec.refusals is not None}
    assert set(words["gated_mlp"]["act"]) == set(get_args(typing.Gate))
    assert set(words["mlp"]["save"]) == set(get_args(typing.Saved))
    assert set(words["cross_entropy"]["reduction"]) == set(get_args(typing.Reduction))
