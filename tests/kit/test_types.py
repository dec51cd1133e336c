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

    A test, because nox -s lint, which checks the types of all else, has no built extension. The
    stub imports no other module, so mypy does not read the package and torch.
    """
    pytest.importorskip("mypy")
    allowed, settings = tmp_path / "allowed", tmp_path / "mypy.ini"
    allowed.write_text("torchkiln._C.Watch\n")  # the metaclass of pybind11
    settings.write_text("[mypy]\nfollow_imports = skip\n")
    words = ["torchkiln._C", "--ignore-missing-stub", "--allowlist", str(allowed)]
    words += ["--mypy-config-file", str(settings)]
    command = [sys.executable, "-W", "ignore", "-m", "mypy.stubtest", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_words_are_those_of_the_ops() -> None:
    assert set(get_args(typing.Activation)) == set(FORMULAS)
    words = {spec.name: spec.refusals.words for spec in SPECS if spec.refusals is not None}
    assert set(words["gated_mlp"]["act"]) == set(get_args(typing.Gate))
    assert set(words["mlp"]["save"]) == set(get_args(typing.Saved))
    assert set(words["cross_entropy"]["reduction"]) == set(get_args(typing.Reduction))
