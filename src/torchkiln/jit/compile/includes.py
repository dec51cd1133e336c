"""Which files a source includes, without a compiler: a start from the cache loads none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\S+))', re.MULTILINE)


def included(source: str, folder: Path, search: Sequence[Path]) -> dict[Path, str] | None:
    """The text of all files that a source includes, directly or not.

    Conditions are not looked at, so that there may be more than a compiler would read. Files that
    lie nowhere in ``folder`` and ``search``, CUDA's own among them, are left out.

    Args:
        source: text of a file in ``folder``.
        folder: where names in quotes are looked for first.
        search: where all are looked for.

    Returns:
        None where a name is made by a macro: only a compiler knows the file then.
    """
    found: dict[Path, str] = {}
    waiting = [(source, folder)]
    while waiting:
        text, beside = waiting.pop()
        for quoted, angled, made in INCLUDE.findall(text):
            if made:
                return None
            name = quoted or angled
            places = (beside, *search) if quoted else search
            path = next(((p / name).resolve() for p in places if (p / name).is_file()), None)
            if path is not None and path not in found:
                found[path] = path.read_text(encoding="utf-8", errors="replace")
                waiting.append((found[path], path.parent))
    return found
