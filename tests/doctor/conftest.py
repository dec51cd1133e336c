"""Simulated machines for the tests of the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_machine import Machine


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    """A machine without anything."""
    return Machine(tmp_path)


@pytest.fixture
def machine(bare: Machine) -> Machine:
    """A machine on which every check passes."""
    return bare.healthy()
