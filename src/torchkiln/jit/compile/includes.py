"""The files that a compilation reads, found without a compiler: a start from the cache needs none.

A scan may find more files than NVRTC reads, never fewer: conditions are ignored, directives in
comments count, and each name is looked up in every folder. If the text does not contain the names,
the scan is marked as incomplete.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torchkiln.jit.compile.toolkit import torchkiln_include

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPLICE = re.compile(r"\\\r?\n")
GAP = r"(?:[ \t\v\f]|/\*(?:[^*]|\*(?!/))*+\*/)*+"
"""Blanks and block comments, which may stand anywhere in a directive."""

# Only blanks and comments precede a directive on its line. %: and ??= are spellings of #.
INCLUDE = re.compile(
    r"(?:^|[\r\n]|\*/)[ \t\v\f]*+(?:#|%:|\?\?=)"
    + GAP
    + r"(include\w*+|import|embed)"
    + GAP
    + r'(?:"([^"\r\n]+)"|<([^>\r\n]+)>)?'
)
UNCLEAR = re.compile(r"__has_|__DATE__|__TIME__|\?\?/")
"""Text whose meaning depends on the existence of a file or on the clock, or that joins lines."""

FOLDER_OPTION = re.compile(r"\s*(?:-I|--include-path\b)\s*=?\s*(.*)", re.DOTALL)
FILE_OPTION = re.compile(r"\s*(?:-include\b|--pre-include\b)\s*=?\s*(.*)", re.DOTALL)
UNCLEAR_OPTION = re.compile(r"include|pch|options?.file|optf|" + UNCLEAR.pattern)
"""Options that may read files in other ways, among options that no pattern above matches."""


def search_folders(
    path: str, include: Sequence[Path] = (), cuda: Sequence[Path] = ()
) -> tuple[Path, ...]:
    """The folders that NVRTC searches, in order. A source without a file has no folder.

    Args:
        path: the source. Only an absolute path is a file.
        include: the user's folders.
        cuda: the folders of CUDA's headers.
    """
    own = torchkiln_include()
    beside = (Path(path).parent,) if Path(path).is_absolute() else ()
    return (own / "torchkiln" / "nvrtc", *include, own, *cuda, *beside)


@dataclass
class Scan:
    """The files that a compilation of a source may read, without CUDA's headers."""

    files: dict[Path, str] = field(default_factory=dict)
    """The text of each file. Bytes that are not UTF-8 become surrogates, so that different files
    have different texts."""
    names: set[str] = field(default_factory=set)
    """The names of files in all directives."""
    is_complete: bool = True
    """False if only a compiler can find all files. Then the cache is not used."""

    def read(self, text: str) -> Iterator[str]:
        """The names that a text includes."""
        joined = SPLICE.sub("", text)
        if UNCLEAR.search(joined):
            self.is_complete = False
        for directive, quoted, angled in INCLUDE.findall(joined):
            if directive == "include" and (name := quoted or angled):
                self.names.add(name)
                yield name
            else:
                self.is_complete = False

    def read_options(self, options: Sequence[str]) -> tuple[list[Path], list[str]]:
        """The folders of ``-I`` options, and the files of ``-include`` options.

        The scan becomes incomplete if another option may read files.
        """
        folders: list[Path] = []
        files: list[str] = []
        words = iter(options)
        for word in words:
            if match := FOLDER_OPTION.fullmatch(word):
                folders.append(Path(match[1] or next(words, "")))
            elif match := FILE_OPTION.fullmatch(word):
                files.append(match[1] or next(words, ""))
            elif UNCLEAR_OPTION.search(word):
                self.is_complete = False
        return folders, files

    def add(self, given: str) -> Iterator[tuple[str, str]]:
        """Adds a file if it exists; yields its includes, each with the folder searched first."""
        if not os.path.isfile(given):  # noqa: PTH113  most are missing: a Path takes four times as long
            return
        # A link is not resolved: NVRTC searches the folder of the link, not of its target.
        file = Path(given).parent.resolve() / Path(given).name
        if file in self.files:
            return
        try:
            text = file.read_bytes().decode("utf-8", "surrogateescape")
        except OSError:
            self.is_complete = False
            return
        self.files[file] = text
        for name in self.read(text):
            yield name, str(file.parent)


def scan(source: str, path: str, include: Sequence[Path] = (), options: Sequence[str] = ()) -> Scan:
    """Finds the files that a source includes, directly or through other files.

    Args:
        source: the text.
        path: its file, or a name without a folder.
        include: the user's folders.
        options: options for NVRTC.
    """
    found = Scan()
    named, first = found.read_options(options)
    folders = [str(folder) for folder in (*search_folders(path, include), *named)]
    pending = [(name, ".") for name in first]
    pending += [(name, folders[0]) for name in found.read(source)]
    while pending:
        name, beside = pending.pop()
        for folder in dict.fromkeys((beside, *folders)):
            pending += found.add(f"{folder}/{name}" if not name.startswith("/") else name)
    return found
