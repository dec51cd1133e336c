"""Writes a package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torchkiln
from torchkiln import _loader
from torchkiln.new import check
from torchkiln.new.template import COMMON, TEMPLATES, files, words_of

if TYPE_CHECKING:
    from pathlib import Path


def write_package(name: str, template: str, into: Path) -> list[Path]:
    """Writes a package with one op, both called ``name``, and returns the files.

    Args:
        name: of the package, its op and their namespaces.
        template: one of :data:`TEMPLATES`.
        into: a folder that is empty or does not exist.
    """
    check.name(name)
    known(template)
    check.folder(into)
    built = _loader.read_record(_loader.find_package(torchkiln.__path__))
    version = _loader.minor(built["version"])
    words = words_of(template, name, name, version)
    return [store(into / path, text) for path, text in files((COMMON, template), words).items()]


def known(template: str) -> str:
    """Returns the name of a template if there is one."""
    if template not in TEMPLATES:
        wanted = ", ".join(TEMPLATES)
        raise ValueError(f"{check.WHERE}: --template: got {template!r}, expected one of {wanted}")
    return template


def store(path: Path, text: str) -> Path:
    """Writes a file, and makes its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
