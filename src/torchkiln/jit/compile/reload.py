"""Detects that a source or one of its own headers was saved."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchkiln.jit.compile.includes import scan
from torchkiln.jit.compile.toolkit import torchkiln_include

if TYPE_CHECKING:
    from collections.abc import Sequence

GONE_SECONDS = 0.3
"""Longest wait for a file that an editor has removed or emptied and will write again."""

UNSETTLED_NANOSECONDS = 100_000_000
"""Age of a file below which its text is compared, too: the clock of a file system ticks every few
milliseconds, so a second save can have the same time."""

Stamp = tuple[int, int, int] | None
"""Time, size and inode of a file; None if it is missing."""


def stamp(path: str) -> Stamp:
    """Facts about a file, at least one of which changes when it is saved: time, size, inode."""
    try:
        facts = os.stat(path)  # noqa: PTH116  twice as fast as Path.stat
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


class Files:
    """A file and the headers that it includes, without torchkiln's and CUDA's.

    Headers whose name only a compiler can find, as in ``#include MACRO``, are not included.

    Args:
        path: the file, as an absolute path.
        include: the user's folders with headers.
        options: options for NVRTC, which may name folders and headers.
    """

    def __init__(
        self, path: Path, include: Sequence[Path] = (), options: Sequence[str] = ()
    ) -> None:
        self.path = path
        self._include = include
        self._options = options
        self._texts: dict[str, str] = {}
        self._stamps: dict[str, Stamp] = {str(path): None}
        self._settled = False
        self._read()

    @property
    def source(self) -> str:
        """The file's text."""
        return self._texts[str(self.path)]

    @property
    def names(self) -> list[str]:
        """The paths of all files, the source first."""
        return list(self._stamps)

    def changed(self, *, closely: bool = False) -> bool:
        """Whether a text differs from the last call.

        If times and sizes are equal, no text is read, and the call takes 1 us per file.

        Args:
            closely: always read the texts, which also finds headers that were missing before.
        """
        if self._settled and not closely:
            for name, known in self._stamps.items():
                if stamp(name) != known:
                    break
            else:
                return False
        before = self._texts
        self._read()
        return self._texts != before

    def _read(self) -> None:
        """Reads stamps before texts, so that the next stamp shows a save between the two."""
        self._wait()
        stamps = {str(self.path): stamp(str(self.path))}
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError as error:
            self._settled = False
            raise FileNotFoundError(
                f"torchkiln.jit: path: {self.path} cannot be read ({error.strerror}), expected a"
                " file of kernels; the next call tries again"
            ) from None
        own = torchkiln_include().resolve()
        found = scan(text, str(self.path), self._include, self._options)
        texts = {str(self.path): text}
        for path, header in found.files.items():
            if not path.is_relative_to(own):
                stamps[str(path)] = stamp(str(path))
                texts[str(path)] = header
        self._stamps, self._texts = stamps, texts
        newest = max((seen[0] for seen in stamps.values() if seen), default=0)
        self._settled = time.time_ns() - newest > UNSETTLED_NANOSECONDS

    def _wait(self) -> None:
        """Waits for files that an editor is about to write."""
        end = time.monotonic() + GONE_SECONDS
        while any(map(self._is_gone, self._stamps)) and time.monotonic() < end:
            time.sleep(0.005)

    def _is_gone(self, name: str) -> bool:
        now = stamp(name)
        return now is None or (now[1] == 0 and self._texts.get(name, "") != "")
