"""Adds an op to torchkiln's sources: the files of a template, and a line in each list of ops."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchkiln.new import check
from torchkiln.new.edit import Before, Edit, Listed, applied
from torchkiln.new.template import COMMON, FOLDER, FUNCTION, files, filled, words_of
from torchkiln.new.write import known, store, tidy

if TYPE_CHECKING:
    from pathlib import Path


def add_op(name: str, template: str, root: Path) -> list[Path]:
    """Adds an op with its kernels, contract and entries; returns the files that were written.

    Args:
        name: the name of the op and of its family.
        template: one of :data:`torchkiln.new.TEMPLATES`.
        root: a checkout of torchkiln.
    """
    api = root / "src" / "torchkiln" / "__init__.py"
    if not api.is_file() or not (root / "cpp" / "ops").is_dir():
        raise ValueError(
            f"{check.WHERE}: --op: got the folder {root}, expected a checkout of torchkiln; go "
            "there, or name it by --out"
        )
    check.name(name, api)
    words = words_of(known(template), "torchkiln", name, version="")
    made = sources(template, words)
    if taken := [path for path in made if (root / path).exists()]:
        raise FileExistsError(f"{check.WHERE}: NAME: got {name!r}, but there is {taken[0]} already")
    changes = edits(words)
    before = {edit.path: (root / edit.path).read_text(encoding="utf-8") for edit in changes}
    after = applied(changes, before)
    written = [store(root / path, text) for path, text in {**made, **after}.items()]
    tidy(root, [path.relative_to(root).as_posix() for path in written])
    return written


def sources(template: str, words: dict[str, str]) -> dict[str, str]:
    """The files of a template by their paths in the checkout."""
    name = words["OPNAME"]
    moved = {
        FUNCTION: f"src/torchkiln/ops/{name}.py",
        "src/PACKAGE/spec.py": f"src/torchkiln/testing/specs/{name}.py",
    }
    written = files((template,), words | {"PACKAGE": "PACKAGE"})
    return {
        filled(moved.get(path, path), words): filled(at_home(text), words)
        for path, text in written.items()
    }


def at_home(text: str) -> str:
    """The text without ``torchkiln::``, ``using namespace torchkiln`` and the list of specs.

    Symbols of torchkiln's own functions contain its version.
    """
    text = re.sub("^TORCHKILN_VISIBLE", "TORCHKILN_EXPORT", text, flags=re.MULTILINE)
    outside = r"^using namespace torchkiln(::cpu::\w+)?;\n\n?|\nSPECS = .*\n\Z"
    return re.sub(outside, "", text, flags=re.MULTILINE).replace("torchkiln::", "")


def edits(words: dict[str, str]) -> list[Edit]:
    """A line in each list of ops."""
    name = words["OPNAME"]

    def lines_of(path: str, pattern: str) -> str:
        """The lines of a template file that match ``pattern``, filled in."""
        text = (FOLDER / COMMON / path).read_text(encoding="utf-8")
        found = [line for line in text.splitlines() if re.search(pattern, line)]
        return filled("".join(f"{line}\n" for line in found), words)

    header = at_home(lines_of("cpp/include/PACKAGE/torch/ops.h", "SUMMARY|PARAMETERS"))
    python = "src/torchkiln/__init__.py"
    imported = f"from torchkiln.ops.{name} import {name}  # noqa: E402"
    return [
        Before("cpp/include/torchkiln/torch/ops.h", "}  // namespace torchkiln", f"{header}\n"),
        Before(
            "cpp/python/module.cpp",
            "  bind_trace(module);",
            lines_of("cpp/python/module.cpp", r"ops\.bind<"),
        ),
        Listed(python, r"from torchkiln\.ops\.(\w+) import .*noqa: E402$", imported),
        Listed(python, r'    "([a-z]\w*)",$', f'    "{name}",'),
    ]
