"""Adds an op to torchkiln's own sources: files of a template, and a line in each list."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from torchkiln.new import check
from torchkiln.new.edit import Before, Edit, End, Listed, applied
from torchkiln.new.template import FOLDER, files, filled
from torchkiln.new.write import known, store

if TYPE_CHECKING:
    from pathlib import Path


def add_op(name: str, template: str, root: Path) -> list[Path]:
    """Adds an op with its kernels, tests and entries; the files that were written.

    Args:
        name: of the op, of its family, and so of its files.
        template: one of :data:`torchkiln.new.TEMPLATES`.
        root: a checkout of torchkiln.
    """
    api = root / "src" / "torchkiln" / "__init__.py"
    if not api.is_file() or not (root / "cpp" / "ops").is_dir():
        raise ValueError(
            f"{check.WHERE}: --op: got the folder {root}, expected a checkout of torchkiln; go "
            "there, or name it by --into"
        )
    check.name(name, api)
    known(template)
    words = {"PACKAGE": "torchkiln", "OPNAME": name, "KILN_VERSION": ""}
    made = sources(template, words)
    if taken := [path for path in made if (root / path).exists()]:
        raise FileExistsError(f"{check.WHERE}: NAME: got {name!r}, but there is {taken[0]} already")
    changes = edits(template, name, words)
    before = {edit.path: (root / edit.path).read_text(encoding="utf-8") for edit in changes}
    after = applied(changes, before)
    written = [store(root / path, text) for path, text in {**made, **after}.items()]
    tidy(root, [*made, "src/torchkiln/_C.pyi"])
    return written


def sources(template: str, words: dict[str, str]) -> dict[str, str]:
    """The op's own files: a package's kernels, operator, function and spec; a test of its own."""
    name = words["OPNAME"]
    spec = "src/torchkiln/spec.py"
    kept = ("cuda/", "cpp/cpu/", "cpp/ops/", f"src/torchkiln/{name}", spec, "tests/")
    inside = words | {"PACKAGE": "PACKAGE"}
    found = {
        filled(path, words): filled(at_home(text), words)
        for path, text in files((template, "checkout"), inside).items()
        if filled(path, words).startswith(kept)
    }
    found[f"src/torchkiln/testing/specs/{name}.py"] = found.pop(spec)
    return found


def at_home(text: str) -> str:
    """Without the names of the namespaces and of the folder that the code will be in."""
    text = re.sub(r"^(using torchkiln::\w+|namespace loops = .+);\n", "", text, flags=re.MULTILINE)
    for away in ("torchkiln::", "loops::", "torchkiln/cpu/"):
        text = text.replace(away, "")
    return re.sub(r"\n{3,}", "\n\n", text)


def edits(template: str, name: str, words: dict[str, str]) -> list[Edit]:
    """A line in each list of ops, and one for the reader."""

    def part(path: str) -> str:
        return filled((FOLDER / template / path).read_text(encoding="utf-8"), words)

    declared = part("cpp/include/PACKAGE/ops.h").partition("{\n\n")[2].rpartition("\n}")[0]
    stub = part("src/PACKAGE/_C.pyi").strip().splitlines()[-1]
    said = f"- `torchkiln.{described(part('src/PACKAGE/OPNAME.py'))}"
    pybind = f'  module.def("{name}", torch::wrap_pybind_function_no_gil(torchkiln::{name}));'
    python = "src/torchkiln/__init__.py"
    specs = "src/torchkiln/testing/specs/__init__.py"
    a_spec = f"from torchkiln.testing.specs.{name} import SPEC as {name.upper()}"
    add = "- `torchkiln.add(a, b)`: `a + b`, broadcasting and dtype promotion as in `torch.add`."
    added = (
        "- `torchkiln.add`: elementwise sum, broadcasting and dtype promotion as in `torch.add`."
    )
    return [
        Listed("cuda/CMakeLists.txt", r"      (\w+)\.cu$", f"      {name}.cu"),
        Listed("cpp/CMakeLists.txt", r"  cpu/(\w+)\.cpp$", f"  cpu/{name}.cpp"),
        Listed("cpp/CMakeLists.txt", r"    ops/(\w+)\.cpp$", f"    ops/{name}.cpp"),
        Before("cpp/include/torchkiln/torch/ops.h", "}  // namespace torchkiln", f"{declared}\n"),
        Before("cpp/python/module.cpp", "  define_explain(module);", f"{pybind}\n"),
        End("src/torchkiln/_C.pyi", f"{stub}\n"),
        Listed(
            python,
            r"from torchkiln\.(\w+) import .*noqa: E402$",
            f"from torchkiln.{name} import {name}  # noqa: E402",
        ),
        Listed(python, r'    "([a-z]\w*)",$', f'    "{name}",'),
        Listed(specs, r"from torchkiln\.testing\.specs\.(\w+) import", a_spec),
        Before(specs, "}", f'    "{name}": ({name.upper()},),\n'),
        Before("README.md", add, f"{said}\n"),
        Before("CHANGELOG.md", added, f"{said}\n"),
    ]


def described(text: str) -> str:
    """The call and what it returns, as the first function of a module tells it."""
    function = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
    for argument in function.args.args:
        argument.annotation = None
    returns = (ast.get_docstring(function) or "").splitlines()[0].removeprefix("Returns ")
    arguments = re.sub(r"\s*=\s*", "=", ast.unparse(function.args))
    return f"{function.name}({arguments})`: {returns.replace('``', '`')}"


def tidy(root: Path, paths: list[str]) -> None:
    """Format what was written with what is installed: other names, other breaks of lines."""
    commands = {
        ("clang-format", "-i"): (".cpp", ".cu", ".h"),
        ("ruff", "check", "--no-cache", "--quiet", "--select=I,RUF022", "--fix"): (".py",),
        ("ruff", "format", "--no-cache", "--quiet"): (".py", ".pyi"),
    }
    for command, suffixes in commands.items():
        wanted = [path for path in paths if path.endswith(suffixes)]
        if shutil.which(command[0]) and wanted:
            subprocess.run([*command, *wanted], cwd=root, check=False)
