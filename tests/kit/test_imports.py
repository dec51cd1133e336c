"""Imports within torchkiln have no cycle, and no function has the name of a module."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from subprocess import run
from types import ModuleType

import pytest

import torchkiln

FOLDER = Path(torchkiln.__file__).parent


def name_of(path: Path) -> str:
    """The dotted name of a module in the package's folder."""
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return ".".join(["torchkiln", *(part for part in parts if part != "__init__")])


MODULES = {
    name_of(path): path
    for path in FOLDER.rglob("*.py")
    if not {"templates", "kernel"} & set(path.parts)  # sources of generated packages
}


def nodes_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: not those of functions, or below TYPE_CHECKING."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from nodes_at_import(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from nodes_at_import(node.body + node.orelse + node.finalbody)


def imported_by(path: Path) -> set[str]:
    """The package's modules that a module imports, except the packages that contain it."""
    found: set[str] = set()
    for node in nodes_at_import(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: a relative import"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= members if members <= MODULES.keys() else {node.module, *members}
    name = name_of(path)
    # In torchkiln.ops, `from torchkiln import _C` reads a name of the package that contains it.
    return {module for module in found & MODULES.keys() if not name.startswith(module + ".")}


def test_no_import_cycle() -> None:
    graph = {name: imported_by(path) for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_name_of_a_package_hides_a_module() -> None:
    for name, path in MODULES.items():
        if path.name != "__init__.py" or name == "torchkiln.new":
            continue
        package = importlib.import_module(name)
        for child in [module for module in MODULES if module.rpartition(".")[0] == name]:
            value = getattr(package, child.rpartition(".")[2], None)
            assert value is None or isinstance(value, ModuleType), f"{child} is hidden by {value}"


def test_no_compiler_is_imported_with_the_package() -> None:
    """No compiler is imported: that would take seconds of every process."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import torchkiln; print(*(set(sys.modules) - before))"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "torchkiln" in imported
    assert not imported & {"torch._dynamo", "torch._inductor", "sympy", "triton", "transformers"}
