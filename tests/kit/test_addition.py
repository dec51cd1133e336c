"""The pages on adding an activation or an option fit the sources; `nox -s addition` builds them."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

import check_addition
import pytest
from check_addition import OP, OPTION, PAGES, ROOT, Change, changed, changes

FILE = "one\n  two\nthree\n"
ACTIVATION_PAGE, OPTION_PAGE = PAGES

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pytest.mark.parametrize(("page", "word"), [(ACTIVATION_PAGE, OP), (OPTION_PAGE, OPTION)])
def test_every_change_finds_its_line(page: Path, word: str) -> None:
    for path, content in changed(page, ROOT).items():
        assert word in content.lower(), path
        assert content != (ROOT / path).read_text()
        if path.endswith(".py"):
            ast.parse(content)


def test_an_activation_is_an_edit_of_six_files() -> None:
    assert len(changed(ACTIVATION_PAGE, ROOT)) <= 6


def test_an_option_is_an_edit_of_five_files_and_forty_lines() -> None:
    """The page changes at most 40 lines in five files, counting two lines of docs/ops.md."""
    files, lines = 1, 2
    for path, content in changed(OPTION_PAGE, ROOT).items():
        before = (ROOT / path).read_text().splitlines()
        found = difflib.unified_diff(before, content.splitlines(), n=0)
        lines += sum(line.startswith("+") and not line.startswith("+++") for line in found)
        files += 1
    assert (files, lines) <= (5, 40)
    assert lines <= 40


@each_page
def test_the_page_is_about_a_screen(page: Path) -> None:
    assert len(page.read_text().splitlines()) < 125


@each_page
def test_no_line_is_needed_twice(page: Path) -> None:
    """No two changes are anchored at the same line, so the page can be followed in any order."""
    anchors = [(c.path, c.line) for c in changes(page.name, page.read_text())]
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
    assert Change("page", "file", where, "two", "new\n").apply(FILE) == expected


def test_a_block_goes_to_each_line() -> None:
    change = Change("page", "file", "after", "one", "new\n", each=True)
    assert change.apply("one\ntwo\n  one\n") == "one\nnew\ntwo\n  one\nnew\n"
    with pytest.raises(SystemExit, match="got 1 lines 'one', expected several"):
        change.apply("one\n")


def test_a_block_goes_to_the_end() -> None:
    assert Change("page", "file", None, None, "new\n").apply(FILE) == FILE + "new\n"


@pytest.mark.parametrize(("content", "count"), [("one\n", 0), ("two\ntwo\n", 2)])
def test_a_line_that_is_not_there_once_is_an_error(content: str, count: int) -> None:
    message = f"page: file: got {count} lines 'two', expected 1"
    with pytest.raises(SystemExit, match=re.escape(message)):
        Change("page", "file", "after", "two", "new\n").apply(content)


def test_a_block_without_a_head_is_an_error() -> None:
    page = "`a.py`, after `x`:\n\n```python patch\ny\n```\n"
    assert changes("page", page) == [Change("page", "a.py", "after", "x", "y\n")]
    with pytest.raises(SystemExit, match="got 1 heads of changes, expected 2"):
        changes("page", page + "And so on:\n\n```python patch\nz\n```\n")


def test_the_checks_exist() -> None:
    from torchkiln.testing.contract import CHECKS  # noqa: PLC0415

    assert set(CHECKS) >= check_addition.CHECKS
