"""Values of command-line options, parsed without torch."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

Shape = tuple[int, int]
"""Rows and columns."""

DTYPES = {
    "float32": ("fp32", "float"),
    "float64": ("fp64", "double"),
    "float16": ("fp16", "half"),
    "bfloat16": ("bf16",),
}
"""Torch's names of the dtypes, and the other names that are accepted."""


def dtype_name(text: str) -> str:
    """Torch's name of a dtype: ``bfloat16`` for ``bf16``."""
    for name, others in DTYPES.items():
        if text == name or text in others:
            return name
    known = ", ".join(f"{name} ({', '.join(others)})" for name, others in DTYPES.items())
    raise argparse.ArgumentTypeError(f"got {text!r}, expected one of {known}")


def shape(text: str) -> Shape:
    """Rows and columns, such as 4096x4096."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected rows and columns of at least 1, such as 4096x4096"
        )
    return int(match[1]), int(match[2])


def make_folder(where: str, option: str, folder: Path) -> None:
    """Create a folder that an option names; ValueError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{where}: {option}: got {folder} ({error.strerror}), expected a folder that can be "
            "created"
        ) from error


def write_file(where: str, option: str, path: Path, text: str) -> None:
    """Write a file that an option names, and its folder; ValueError if that fails."""
    make_folder(where, option, path.absolute().parent)
    try:
        write_whole(path, text)
    except OSError as error:
        raise ValueError(
            f"{where}: {option}: got {path} ({error.strerror}), expected a file that can be written"
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file; if that fails, or the process is killed, an old file is unchanged."""
    target = path.resolve()  # keeps a link
    is_device = path.absolute().parts[1] in ("dev", "proc") or (
        path.exists() and not path.is_file()
    )
    if is_device or not os.access(target.parent, os.W_OK):
        path.write_text(text, encoding="utf-8", newline="")
        return
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="")
        if target.exists():
            shutil.copymode(target, unfinished)
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file with a line for each entry of its lists, so that a diff shows entries."""

    def text(value: object) -> str:
        if not isinstance(value, list):
            return json.dumps(value)
        return "[" + ",".join(f"\n{json.dumps(entry)}" for entry in value) + "\n]"

    path.parent.mkdir(parents=True, exist_ok=True)
    members = ",\n".join(f"{json.dumps(name)}: {text(value)}" for name, value in content.items())
    write_whole(path, f"{{\n{members}\n}}\n")
