"""A machine for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_machine import Machine


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    """An empty machine."""
    return Machine(tmp_path)


@pytest.fixture
def machine(bare: Machine) -> Machine:
    """A machine without problems."""
    return bare.healthy()
