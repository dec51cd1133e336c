"""Refuses names and folders that cannot be used, without importing torch."""

from __future__ import annotations

import ast
import keyword
import math
import re
import sys
from pathlib import Path

WHERE = "torchkiln.new"
UNFINISHED = ".unfinished"
"""The folder of a run that is active or was killed."""
API = Path(__file__).parents[1] / "__init__.py"

# Words that cannot name a function or a namespace in C++.
CPP = """alignas alignof asm auto bool case catch char const constexpr decltype default delete do
double enum explicit export extern false float friend goto inline int long mutable namespace new
noexcept nullptr operator private protected public register requires short signed sizeof static std
struct switch template this throw true typedef typename union unsigned using virtual void volatile
"""
# Namespaces of torch and of its ops; then names in torchkiln's headers that templates include.
TORCH = {"at", "aten", "c10", "caffe2", "prim", "prims", "pybind11", "quantized", "torch"}
OURS = {"backward", "call", "composite", "core", "cpu", "cuda", "define", "describe", "device"}
OURS |= {"elementwise", "forward", "kernel", "kernels", "launch", "meta", "spec", "torchkiln"}


def name(given: str, api: Path = API) -> str:
    """Returns the name if it is valid for a module, a function and a C++ namespace."""

    def refuse(words: str) -> ValueError:
        return ValueError(f"{WHERE}: NAME: got {given!r}, {words}")

    if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", given):
        example = re.sub("[^a-z0-9]+", "_", given.lower()).strip("_0123456789")
        hint = f", such as {example!r}" if example else ""
        raise refuse(f"expected lowercase words joined by _, each of letters and digits{hint}")
    if keyword.iskeyword(given) or keyword.issoftkeyword(given) or given in CPP.split():
        raise refuse("which is a word of Python or C++; expected another name")
    if given in sys.stdlib_module_names or given in dir(math):
        raise refuse("which is a module of Python or a function of C; expected another name")
    if given in TORCH | OURS | public(api):
        raise refuse("which is a name of torch or torchkiln; expected another name")
    return given


def public(api: Path) -> set[str]:
    """The public functions and modules of torchkiln, and the families of its ops."""
    paths = [*api.parent.iterdir(), *(api.parent / "ops").iterdir()]
    modules = {path.stem for path in paths if not path.name.startswith("_")}
    for node in ast.parse(api.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return modules | set(ast.literal_eval(node.value))
    return modules


def folder(given: Path) -> Path:
    """Returns the folder if it is missing, empty, or contains only files of a killed run."""
    if given.exists() and not given.is_dir():
        raise FileExistsError(f"{WHERE}: --out: got {given}, a file, expected a new folder")
    if given.is_dir() and any(path.name != UNFINISHED for path in given.iterdir()):
        raise FileExistsError(
            f"{WHERE}: --out: got {given}, which is not empty, expected a new folder"
        )
    return given
