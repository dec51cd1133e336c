"""The code of docs/jit.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "jit.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHKILN_CACHE", str(tmp_path))
    exec(compile(BLOCKS[number], "jit.md", "exec"), {"__name__": "page"})


def test_the_page_has_blocks() -> None:
    assert len(BLOCKS) >= 5
