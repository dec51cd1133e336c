"""A machine for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_machine import Machine


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    """With nothing on it."""
    return Machine(tmp_path)


@pytest.fixture
def machine(bare: Machine) -> Machine:
    """Where everything is as it should be."""
    return bare.healthy()
