"""Every source is compiled. Without a CUDA compiler nothing else would miss a kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Lists of files that are added elsewhere.
GROUP = re.compile(r"\bset\(\s*elementwise\b[^)]*\)")


def compiled(text: str) -> set[str]:
    """The sources that a CMakeLists.txt adds to its targets."""
    return set(re.findall(r"[\w/]+\.(?:cu|cpp)\b", GROUP.sub("", text)))


@pytest.mark.parametrize(("folder", "suffix"), [("cuda", ".cu"), ("cpp", ".cpp")])
def test_every_source_is_compiled(folder: str, suffix: str) -> None:
    sources = {str(p.relative_to(ROOT / folder)) for p in (ROOT / folder).rglob(f"*{suffix}")}
    assert len(sources) > 10
    assert compiled((ROOT / folder / "CMakeLists.txt").read_text()) == sources


def test_a_group_adds_nothing() -> None:
    text = "set(\n  elementwise\n  a.cu\n  b.cu\n)\ntarget_sources(kernels PRIVATE a.cu)"
    assert compiled(text) == {"a.cu"}
