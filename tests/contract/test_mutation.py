"""The list of planted faults fits the sources: no fault is stale."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from torchkiln import testing
from torchkiln.testing.contract import CHECKS

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "mutation" / "faults.py"
SPEC = importlib.util.spec_from_file_location("faults", FILE)
assert SPEC is not None
assert SPEC.loader is not None
faults = importlib.util.module_from_spec(SPEC)
sys.modules["faults"] = faults
SPEC.loader.exec_module(faults)

NAMES = {spec.name for spec in testing.SPECS}


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: faults.Fault) -> None:  # type: ignore[name-defined]
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == fault.times
    assert fault.old != fault.new
    unit = ROOT / (fault.unit or fault.file)
    assert unit.is_file()
    assert unit.suffix in (".cpp", ".cu", ".py")
    assert fault.op in NAMES
    for name, at, dtype in (check.partition("@") for check in fault.checks.split(" or ")):
        known = [str(one).removeprefix("torch.") for one in CHECKS[name].dtypes]
        assert not at or (dtype in known and len(known) > 1)


def test_there_are_enough_of_each_kind() -> None:
    names = [fault.name for fault in faults.FAULTS]
    assert len(names) == len(set(names)) >= 25
    assert {fault.device for fault in faults.FAULTS} == {"cpu", "cuda", "2 x cuda"}
