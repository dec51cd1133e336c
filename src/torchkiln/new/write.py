"""Writes a package."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import torchkiln
from torchkiln import _loader
from torchkiln.new import check
from torchkiln.new.template import COMMON, HUB, TEMPLATES, files, hub_words, words_of

if TYPE_CHECKING:
    from pathlib import Path


def write_package(name: str, template: str, into: Path) -> list[Path]:
    """Writes a package with one op, both called ``name``, and returns the files.

    Args:
        name: the name of the package, of the op and of the namespaces.
        template: one of :data:`TEMPLATES`.
        into: a folder that is empty or does not exist.
    """
    check.name(name)
    known(template)
    check.folder(into)
    built = _loader.read_record(_loader.find_package(torchkiln.__path__))
    version = _loader.minor(built["version"])
    words = words_of(template, name, name, version)
    return write_folder(into, files((COMMON, template), words))


def write_hub_kernel(name: str, into: Path) -> list[Path]:
    """Writes a kernel for Hugging Face's hub, and returns the files.

    Args:
        name: the name of the kernel and of the op.
        into: a folder that is empty or does not exist.
    """
    check.name(name)
    check.folder(into)
    return write_folder(into, files((HUB,), hub_words(name)))


def write_folder(into: Path, made: dict[str, str]) -> list[Path]:
    """Writes all files, or none if writing fails, for example because the disk is full.

    Files are first written into a folder below ``into``, and then moved. A process that is killed
    before the move leaves this folder, which the next run removes.

    Args:
        into: a folder that is empty or does not exist.
        made: the text of each file.
    """
    is_new = not into.exists()
    unfinished = into / check.UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        for path, text in made.items():
            store(unfinished / path, text)
        tidy(unfinished, list(made))
    except BaseException:
        shutil.rmtree(into if is_new else unfinished, ignore_errors=True)
        raise
    for part in list(unfinished.iterdir()):
        part.rename(into / part.name)
    unfinished.rmdir()
    return [into / path for path in made]


def known(template: str) -> str:
    """Returns the name of a template. Raises an error if there is no template of that name."""
    if template not in TEMPLATES:
        wanted = ", ".join(TEMPLATES)
        raise ValueError(f"{check.WHERE}: --template: got {template!r}, expected one of {wanted}")
    return template


def store(path: Path, text: str) -> Path:
    """Writes a file, and makes its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def tidy(root: Path, paths: list[str]) -> None:
    """Formats files with installed tools, because the length of a name changes line breaks.

    clang-format needs the style file of a checkout, which a package does not have.
    """
    commands = {
        ("clang-format", "-i"): (".cpp", ".cu", ".h"),
        ("ruff", "check", "--no-cache", "--quiet", "--select=I,RUF022", "--fix"): (".py",),
        ("ruff", "format", "--no-cache", "--quiet"): (".py", ".pyi"),
    }
    for command, suffixes in commands.items():
        wanted = [path for path in paths if path.endswith(suffixes)]
        styled = command[0] == "ruff" or (root / ".clang-format").is_file()
        if shutil.which(command[0]) and wanted and styled:
            subprocess.run([*command, *wanted], cwd=root, check=False)
