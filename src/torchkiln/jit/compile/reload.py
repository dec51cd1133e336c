"""A source on disk and the headers of its author: whether one of them was saved again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchkiln.jit.compile.includes import included
from torchkiln.jit.compile.toolkit import torchkiln_include

if TYPE_CHECKING:
    from collections.abc import Sequence

GONE_SECONDS = 0.3
"""How long a file is waited for that an editor has removed or emptied before it writes it."""

UNSETTLED_NANOSECONDS = 100_000_000
"""A file saved so shortly ago may be saved once more without another time, of which clocks of file
systems have one for some milliseconds: until then its text is read, too."""

Look = tuple[int, int, int] | None


def look(path: str) -> Look:
    """What changes when a file is saved: time, size and, where it is replaced, number."""
    try:
        facts = os.stat(path)  # noqa: PTH116  half the time of Path's
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


class Files:
    """A file and what it includes, without torchkiln's and CUDA's own headers.

    Args:
        path: the file.
        search: folders with headers.
    """

    def __init__(self, path: Path, search: Sequence[Path] = ()) -> None:
        self.path = path
        self._search = search
        self._texts: dict[str, str] = {}
        self._looks: dict[str, Look] = {str(path): None}
        self._settled = False
        self._read()

    @property
    def source(self) -> str:
        """The file's text."""
        return self._texts[str(self.path)]

    @property
    def names(self) -> list[str]:
        """All files, the source first."""
        return list(self._looks)

    def changed(self, *, closely: bool = False) -> bool:
        """Whether a text is another than when this was asked last.

        As long as times and sizes are the same, nothing is read: a microsecond a file.

        Args:
            closely: read all the same, which finds headers that were not there before.
        """
        if self._settled and not closely:
            for name, known in self._looks.items():
                if look(name) != known:
                    break
            else:
                return False
        before = self._texts
        self._read()
        return self._texts != before

    def _read(self) -> None:
        """Looks come before texts: what is saved between the two is seen at the next look."""
        self._wait()
        looks = {str(self.path): look(str(self.path))}
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError as error:
            self._settled = False
            raise FileNotFoundError(
                f"torchkiln.jit: path: {self.path} cannot be read ({error.strerror}), expected a"
                " file of kernels; the next call looks again"
            ) from None
        own = torchkiln_include().resolve()
        found = included(text, self.path.parent, (*self._search, own)) or {}
        texts = {str(self.path): text}
        for path, header in found.items():
            if not path.is_relative_to(own):
                looks[str(path)] = look(str(path))
                texts[str(path)] = header
        self._looks, self._texts = looks, texts
        newest = max((seen[0] for seen in looks.values() if seen), default=0)
        self._settled = time.time_ns() - newest > UNSETTLED_NANOSECONDS

    def _wait(self) -> None:
        """For files that an editor is about to write."""
        until = time.monotonic() + GONE_SECONDS
        while any(map(self._away, self._looks)) and time.monotonic() < until:
            time.sleep(0.005)

    def _away(self, name: str) -> bool:
        now = look(name)
        return now is None or (now[1] == 0 and self._texts.get(name, "") != "")
