"""Values of command-line options, parsed without torch."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

Shape = tuple[int, int]
"""Rows and columns of a call."""

DTYPES = {
    "float32": ("fp32", "float"),
    "float64": ("fp64", "double"),
    "float16": ("fp16", "half"),
    "bfloat16": ("bf16",),
}
"""Torch's names of the dtypes, and the other names that are accepted."""

DIRECTIONS = ("forward", "backward", "both")

STDOUT = Path("-")
"""The value of ``--json`` that is standard output."""


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


def device(text: str) -> str:
    """A device as torch names it."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected cpu, cuda or cuda:N")
    return text


def json_file(text: str) -> Path:
    """A file for JSON. Its name ends in .json, so an op after ``--json`` is not taken for it."""
    if text != str(STDOUT) and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a name that ends in .json; for standard output type --json=-"
        )
    return Path(text)


def add_json(options: argparse.ArgumentParser) -> None:
    """Add ``--json``, which has one meaning in all commands."""
    options.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        type=json_file,
        metavar="FILE",
        help="write JSON to a file, or without a file print JSON and nothing else",
    )


def add_direction(options: argparse.ArgumentParser, *choices: str, default: str) -> None:
    """Add ``--direction``, which selects parts of a call."""
    options.add_argument(
        "--direction",
        choices=choices,
        default=default,
        help=f"parts of the call (default: {default})",
    )


@contextmanager
def text_output(json_output: Path | None) -> Iterator[None]:
    """Discard printed text if standard output is for JSON."""
    if json_output != STDOUT:
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def output_json(where: str, path: Path | None, text: str) -> None:
    """Write JSON to where ``--json`` says, if it was given."""
    if path == STDOUT:
        print(text.removesuffix("\n"))
    elif path is not None:
        write_file(where, "--json", path, text.removesuffix("\n") + "\n")


def require_json(where: str, path: Path | None, option: str = "--json") -> None:
    """Refuse a file of JSON that cannot be written, before a long run."""
    if path is None or path == STDOUT:
        return
    folder = path.absolute().parent
    make_folder(where, option, folder)
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{where}: {option}: got {path}, expected a file that can be written")


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
    target = path.resolve()  # a link is kept, and its target is written
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


def json_lines(content: Mapping[str, object]) -> str:
    """JSON with a line for each entry of its lists, so that a diff shows entries."""

    def text(value: object) -> str:
        if not isinstance(value, list):
            return json.dumps(value)
        return "[" + ",".join(f"\n{json.dumps(entry)}" for entry in value) + "\n]"

    members = ",\n".join(f"{json.dumps(name)}: {text(value)}" for name, value in content.items())
    return f"{{\n{members}\n}}\n"
