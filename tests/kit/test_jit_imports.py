"""torchkiln.jit: the imports between its modules have no cycle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from torchkiln import jit

FOLDER = Path(jit.__path__[0])
PACKAGE = "torchkiln.jit"


def name_of(path: Path) -> str:
    """The full name of a module of the package."""
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return ".".join([PACKAGE, *(part for part in parts if part != "__init__")])


MODULES = {name_of(path): path for path in FOLDER.rglob("*.py")}


def imported_by(path: Path) -> set[str]:
    """The package's modules that a module imports: at the top, in functions, or for type checks."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: a relative import"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= members if members <= MODULES.keys() else {node.module, *members}
    return found & MODULES.keys()


def test_no_import_cycle() -> None:
    graph = {name: imported_by(path) for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the modules
