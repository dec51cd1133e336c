"""Lines that go into files which exist; each has to find its place."""

from __future__ import annotations

import re
from dataclasses import dataclass


class EditError(ValueError):
    """A file is not as an edit expects it."""

    def __init__(self, path: str, got: str, expected: str) -> None:
        super().__init__(
            f"torchkiln.new: {path}: got {got}, expected {expected}; nothing was written"
        )


@dataclass(frozen=True)
class Before:
    """Text that goes before a line, which the file has once."""

    path: str
    line: str
    text: str

    def apply(self, content: str) -> str:
        """The file with the text."""
        lines = content.splitlines(keepends=True)
        places = [i for i, line in enumerate(lines) if line.rstrip("\n") == self.line]
        if len(places) != 1:
            raise EditError(self.path, f"{len(places)} lines {self.line!r}", "1")
        return "".join([*lines[: places[0]], self.text, *lines[places[0] :]])


@dataclass(frozen=True)
class Listed:
    """A line of a list in alphabetical order."""

    path: str
    pattern: str
    """Matches a line of the list, its group what the list is sorted by."""
    line: str

    def apply(self, content: str) -> str:
        """The file with the line, before the first that comes after it or else after the last."""
        lines = content.splitlines(keepends=True)
        own = re.match(self.pattern, self.line)
        entries = [(i, m[1]) for i, line in enumerate(lines) if (m := re.match(self.pattern, line))]
        if own is None or len(entries) < 2:
            raise EditError(self.path, f"{len(entries)} lines like {self.pattern!r}", "a list")
        if own[1] in {key for _, key in entries}:
            raise EditError(self.path, f"{own[1]!r} already", "it not to be there")
        after = [i for i, key in entries if key > own[1]]
        place = after[0] if after else entries[-1][0] + 1
        return "".join([*lines[:place], self.line + "\n", *lines[place:]])


@dataclass(frozen=True)
class End:
    """Text that goes to the end."""

    path: str
    text: str

    def apply(self, content: str) -> str:
        """The file with the text."""
        return content + self.text


Edit = Before | Listed | End


def applied(edits: list[Edit], read: dict[str, str]) -> dict[str, str]:
    """The files after all edits; ``read`` has them before."""
    files = dict(read)
    for edit in edits:
        files[edit.path] = edit.apply(files[edit.path])
    return files
