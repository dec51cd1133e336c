"""docs/replaced_times.py: its modules are replaced, and each has a row on the page."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/replaced_times.py, imported."""
    spec = spec_from_file_location("replaced_times", DOCS / "replaced_times.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses read it there
    spec.loader.exec_module(module)
    return module


def test_modules_are_replaced(script: ModuleType) -> None:
    head, _, *rows = script.table(torch.device("cpu"), 2)
    assert len(rows) == len(script.FORMS)
    kept = [row for row in rows if "not replaced" in row]
    assert [row.split(" | ")[0] for row in kept] == ["| `nn.GroupNorm`"]
    for row in rows:
        if row not in kept:
            assert re.fullmatch(r"\| .* \| [\d.]+ -> [\d.]+ \| [\d.]+ \| .* \| [\d.]+ \|", row)
    assert head in (DOCS / "models.md").read_text(encoding="utf-8")


def test_the_page_has_a_row_for_each_module(script: ModuleType) -> None:
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    for form in script.FORMS:
        assert f"\n| {form.name} | " in page
