"""The files that a source includes, found without a compiler: a start from the cache needs none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\S+))', re.MULTILINE)


def included(source: str, folder: Path, search: Sequence[Path]) -> dict[Path, str] | None:
    """The text of every file that a source includes, directly or through other files.

    Preprocessor conditions are ignored, so the result may have more files than a compiler reads.
    Files outside ``folder`` and ``search``, such as CUDA's own, are left out.

    Args:
        source: the text of a file in ``folder``.
        folder: the first folder for names in quotes.
        search: the folders for all names.

    Returns:
        None if a macro gives a name, since only a compiler can resolve it.
    """
    texts: dict[Path, str] = {}
    pending = [(source, folder)]
    while pending:
        text, beside = pending.pop()
        for quoted, angled, macro in INCLUDE.findall(text):
            if macro:
                return None
            name = quoted or angled
            folders = (beside, *search) if quoted else search
            path = next(((p / name).resolve() for p in folders if (p / name).is_file()), None)
            if path is not None and path not in texts:
                texts[path] = path.read_text(encoding="utf-8", errors="replace")
                pending.append((texts[path], path.parent))
    return texts
