"""The page about adding an activation fits the sources; `nox -s addition` builds the result."""

from __future__ import annotations

import ast
import re

import check_addition
import pytest
from check_addition import OP, PAGE, ROOT, Change, changed, changes

FILE = "one\n  two\nthree\n"


def test_every_change_finds_its_line() -> None:
    files = changed(PAGE.read_text(), ROOT)
    assert "cuda/include/torchkiln/core/activations.h" in files
    for path, content in files.items():
        assert OP in content.lower(), path
        assert content != (ROOT / path).read_text()
        if path.endswith(".py"):
            ast.parse(content)


def test_the_page_is_about_a_screen() -> None:
    assert len(PAGE.read_text().splitlines()) < 120


def test_no_line_is_needed_twice() -> None:
    """The page can be followed in any order."""
    anchors = [(c.path, c.line) for c in changes(PAGE.read_text())]
    assert len(anchors) == len(set(anchors))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("after", "one\n  two\nnew\nthree\n"),
        ("before", "one\nnew\n  two\nthree\n"),
        ("instead of", "one\nnew\nthree\n"),
    ],
)
def test_a_block_goes_to_its_line(where: str, expected: str) -> None:
    assert Change("file", where, "two", "new\n").apply(FILE) == expected


def test_a_block_goes_to_the_end() -> None:
    assert Change("file", None, None, "new\n").apply(FILE) == FILE + "new\n"


@pytest.mark.parametrize(("content", "count"), [("one\n", 0), ("two\ntwo\n", 2)])
def test_a_line_that_is_not_there_once_is_an_error(content: str, count: int) -> None:
    message = f"adding-an-activation.md: file: got {count} lines 'two', expected 1"
    with pytest.raises(SystemExit, match=re.escape(message)):
        Change("file", "after", "two", "new\n").apply(content)


def test_a_block_without_a_head_is_an_error() -> None:
    page = "`a.py`, after `x`:\n\n```python patch\ny\n```\n"
    assert changes(page) == [Change("a.py", "after", "x", "y\n")]
    with pytest.raises(SystemExit, match="got 1 heads of changes, expected 2"):
        changes(page + "And so on:\n\n```python patch\nz\n```\n")


def test_the_checks_exist() -> None:
    from torchkiln.testing.contract import CHECKS  # noqa: PLC0415

    assert set(CHECKS) >= check_addition.CHECKS
