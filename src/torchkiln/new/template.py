"""What a template makes of a name: files by their path."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

FOLDER = Path(__file__).parent / "templates"
COMMON = "common"

TEMPLATES = {
    "elementwise": "a formula and its derivative in torchkiln's skeleton: any strides, two inputs",
    "reduction": "one number for each row: a kernel for rows, a broadcast formula as backward",
    "custom": "a kernel of your own, with dynamic shared memory",
}
"""By name, and in words."""

PLACEHOLDER = re.compile("PACKAGE|OPNAME|KILN_VERSION")


def filled(text: str, words: dict[str, str]) -> str:
    """The text with words for the placeholders."""
    return PLACEHOLDER.sub(lambda match: words[match[0]], text)


def place(path: PurePosixPath, words: dict[str, str]) -> str:
    """Where a file of a template goes."""
    parts = [re.sub("^dot_", ".", part) for part in path.parts]
    return filled("/".join(parts), words)


def files(folders: tuple[str, ...], words: dict[str, str]) -> dict[str, str]:
    """The files of some folders of templates, filled in; later folders replace earlier ones'."""
    found = {}
    for folder in folders:
        root = FOLDER / folder
        for file in sorted(root.rglob("*")):
            path = PurePosixPath(file.relative_to(root).as_posix())
            if file.is_file() and not path.match("__pycache__/*"):
                to = place(path, words)
                found[to] = filled(file.read_text(encoding="utf-8"), words)
    return found
