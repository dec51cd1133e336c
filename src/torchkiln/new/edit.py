"""Edits of existing files. It is an error if a file has no place for its edit."""

from __future__ import annotations

import re
from dataclasses import dataclass


class EditError(ValueError):
    """A file has no place for an edit."""

    def __init__(self, path: str, got: str, expected: str) -> None:
        super().__init__(
            f"torchkiln.new: {path}: got {got}, expected {expected}; nothing was written"
        )


@dataclass(frozen=True)
class Before:
    """Inserts text before a line that occurs once in the file."""

    path: str
    line: str
    text: str

    def apply(self, content: str) -> str:
        """Returns the file with the text."""
        lines = content.splitlines(keepends=True)
        places = [i for i, line in enumerate(lines) if line.rstrip("\n") == self.line]
        if len(places) != 1:
            raise EditError(self.path, f"{len(places)} lines {self.line!r}", "1")
        return "".join([*lines[: places[0]], self.text, *lines[places[0] :]])


@dataclass(frozen=True)
class Listed:
    """Inserts a line into a list in alphabetical order."""

    path: str
    pattern: str
    """Matches the lines of the list; the group of the match is the sort key."""
    line: str

    def apply(self, content: str) -> str:
        """Returns the file with the line."""
        lines = content.splitlines(keepends=True)
        own = re.match(self.pattern, self.line)
        entries = [(i, m[1]) for i, line in enumerate(lines) if (m := re.match(self.pattern, line))]
        if own is None or len(entries) < 2:
            raise EditError(self.path, f"{len(entries)} lines like {self.pattern!r}", "a list")
        if own[1] in {key for _, key in entries}:
            raise EditError(self.path, f"{own[1]!r} in the list", "a new name")
        after = [i for i, key in entries if key > own[1]]
        place = after[0] if after else entries[-1][0] + 1
        return "".join([*lines[:place], self.line + "\n", *lines[place:]])


Edit = Before | Listed


def applied(edits: list[Edit], read: dict[str, str]) -> dict[str, str]:
    """Returns the files after all edits; ``read`` contains the files before."""
    files = dict(read)
    for edit in edits:
        files[edit.path] = edit.apply(files[edit.path])
    return files
