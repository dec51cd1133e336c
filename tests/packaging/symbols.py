"""The functions that a wheel's libraries export, compared with the list in tests/data/symbols.txt.

Usage: symbols.py WHEEL

Writes the first part of the list if the wheel is without CUDA, else the second part.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import elf
from checks import Checks

SNAPSHOT = Path(__file__).parents[1] / "data" / "symbols.txt"
HEAD = """\
# The functions that programs and packages link, without the version in their symbols: a change of
# one is a change for them (docs/stability.md). `nox -s abi` compares; symbols.py WHEEL writes it.

# In every build
"""
WITH_CUDA = "\n# In a build with CUDA\n"
TAGS = re.compile(r"\[abi:\w+\]")


def check(checks: Checks, ours: list[elf.Library], record: dict[str, Any]) -> None:
    """Each function must be in the list, and must have the minor version in its symbol."""
    functions = exported(ours)
    tag = "[abi:v{}_{}]".format(*record["version"].split("."))
    # C functions have the version in their names.
    unversioned = [name for name in functions if name.startswith("torchkiln::") and tag not in name]
    checks.none(f"the symbol of each function contains {tag}", unversioned)
    found = {TAGS.sub("", name) for name in functions}
    every, with_cuda = listed()
    expected = every | with_cuda if record["cuda"] else every
    missing, new = expected - found, found - expected
    changes = [*(f"- {name}" for name in missing), *(f"+ {name}" for name in new)]
    checks.none(f"exports the functions in {SNAPSHOT.name}", changes)


def exported(ours: list[elf.Library]) -> list[str]:
    """Names of the exported functions, demangled."""
    symbols = {symbol for library in ours for symbol in library.functions}
    return [name for name in elf.demangle(sorted(symbols)) if name.startswith("torchkiln")]


def listed() -> tuple[set[str], set[str]]:
    """The functions in both parts of the list."""
    every, _, with_cuda = SNAPSHOT.read_text(encoding="utf-8").partition(WITH_CUDA)
    return set(every.removeprefix(HEAD).splitlines()), set(with_cuda.splitlines())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(sys.argv[1]) as archive:
        archive.extractall(folder)
        package = Path(folder, "torchkiln")
        record = json.loads((package / "_build_info.json").read_text(encoding="utf-8"))
        found = exported([elf.read(path) for path in package.rglob("*.so")])
    names = {TAGS.sub("", name) for name in found}
    every, with_cuda = listed()
    every, with_cuda = (every, names - every) if record["cuda"] else (names, with_cuda)
    text = "".join(f"{name}\n" for name in sorted(every))
    text += WITH_CUDA + "".join(f"{name}\n" for name in sorted(with_cuda))
    SNAPSHOT.write_text(HEAD + text, encoding="utf-8")


if __name__ == "__main__":
    main()
