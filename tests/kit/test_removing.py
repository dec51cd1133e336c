"""docs/removing-an-op.md names every file of an op, and every file that mentions the op."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "removing-an-op.md"
OP = "group_norm"
FOLDERS = ("cpp", "cuda", "docs", "src", "tests")
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".md", ".py"}
# Files that a build copies or that programs write.
WRITTEN = ("src/torchkiln/include", "docs/results", "docs/contract/")


def listed() -> set[str]:
    """The files and folders that the page names, with OP replaced by the op's name."""
    names = re.findall(r"`([\w/.]+/|[\w/-]+\.\w+)`", PAGE.read_text(encoding="utf-8"))
    return {name.replace("OP", OP) for name in names}


def with_the_op() -> Iterator[str]:
    """Files whose path or text contains the name of the op."""
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for folder in FOLDERS:
        files += (path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    word = re.compile(rf"\b{OP}\b")
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(WRITTEN) or path in {PAGE, Path(__file__).resolve()}:
            continue
        if OP in name or word.search(path.read_text(encoding="utf-8")):
            yield name


def is_listed(name: str, names: set[str]) -> bool:
    """Whether a file, or a folder that contains it, is among the names."""
    return any(name == own or (own.endswith("/") and name.startswith(own)) for own in names)


def test_every_file_with_the_op_is_on_the_page() -> None:
    found = list(with_the_op())
    assert len(found) > 30
    assert [name for name in found if not is_listed(name, listed())] == []


def test_the_page_names_no_file_without_the_op() -> None:
    """Exceptions: files that other families have, and a page that does not write the op's name."""
    found = list(with_the_op())
    unused = {own for own in listed() if not any(is_listed(name, {own}) for name in found)}
    others = {f"cuda/ops/{OP}.cu", f"cpp/cpu/{OP}.cpp", f"cpp/ops/{OP}.cpp", "docs/choosing.md"}
    assert unused == others
