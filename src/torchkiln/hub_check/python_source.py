"""The Python files of a kernel: portable imports, Python 3.9, layers without a state."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from torchkiln.hub_check.problem import Problem

OLDEST = (3, 9)
ALLOWED = {"torch", *sys.stdlib_module_names}
DEPENDENCIES = {"einops", "triton", "cutlass", "helion", "nki", "tvm_ffi"}
"""Modules that the hub knows as dependencies, or that come with torch."""
FLAGS = {"has_backward", "can_torch_compile"}
REGISTRATIONS = {"custom_op", "register_autograd", "register_fake", "register_kernel", "triton_op"}


def check_package(folder: Path) -> Iterator[Problem]:
    """The problems of all Python files below a folder."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        try:
            tree = ast.parse(text, feature_version=OLDEST)
        except SyntaxError as error:
            words = f"got what Python 3.9 cannot parse ({error.msg}), expected its syntax"
            yield Problem(path, words, error.lineno)
            continue
        yield from check_imports(path, tree)
        yield from check_annotations(path, tree)
        yield from check_registrations(path, tree)
        if "layers" in path.relative_to(folder).with_suffix("").parts:
            yield from check_layers(path, tree)
    entry, layers = folder / "__init__.py", folder / "layers.py"
    if entry.is_file() and (layers.is_file() or layers.with_suffix("").is_dir()):
        tree = ast.parse(entry.read_text(encoding="utf-8"))
        imported = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 1]
        if not any(alias.name == "layers" for node in imported for alias in node.names):
            yield Problem(entry, "got no `from . import layers`, expected it beside layers")


def check_imports(path: Path, tree: ast.Module) -> Iterator[Problem]:
    """Imports of modules that a kernel may not depend on."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [str(node.module)]
        for name in names:
            top = name.partition(".")[0]
            if top not in ALLOWED | DEPENDENCIES:
                words = f"got import of {name}, expected torch, the standard library, or the kernel"
                yield Problem(path, f"{words} by a relative import", line_of(node))


def check_annotations(path: Path, tree: ast.Module) -> Iterator[Problem]:
    """Unions as ``X | Y`` that Python 3.9 evaluates."""
    futures = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    if any(alias.name == "annotations" for node in futures for alias in node.names):
        return
    for node in ast.walk(tree):
        given: list[ast.expr | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            given = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            given = [node.returns]
        for annotation in given:
            if annotation is not None and any(
                isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr)
                for part in ast.walk(annotation)
            ):
                words = "got an annotation X | Y, expected Optional or Union, or `from __future__ "
                yield Problem(path, f"{words}import annotations`: Python 3.9", line_of(annotation))


def check_registrations(path: Path, tree: ast.Module) -> Iterator[Problem]:
    """Names of ops without the namespace of the build."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = ast.unparse(node.func).rpartition(".")[2]
        first = node.args[0]
        if called in REGISTRATIONS and isinstance(first, ast.Constant):
            words = f"{called}: got {first.value!r}, expected add_op_namespace_prefix(name)"
            yield Problem(path, words, line_of(node))


def check_layers(path: Path, tree: ast.Module) -> Iterator[Problem]:
    """Layers with a state, or with more than a forward."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for part in node.body:
            words = problem_of_layer(part)
            if words:
                yield Problem(path, f"{node.name}: {words}", line_of(part))


def problem_of_layer(part: ast.stmt) -> str:
    """The problem of a statement in the class of a layer; empty if there is none."""
    if isinstance(part, ast.FunctionDef):
        is_fine = part.name == "forward"
        return "" if is_fine else f"got the method {part.name}, expected only forward"
    if isinstance(part, ast.AnnAssign):
        name = ast.unparse(part.target)
        is_fine = part.value is None or name in FLAGS
        return "" if is_fine else f"got the variable {name}, expected a layer without a state"
    if isinstance(part, ast.Assign):
        names = {ast.unparse(target) for target in part.targets}
        if not names <= FLAGS:
            return f"got the variable {', '.join(sorted(names))}, expected a layer without a state"
    return ""


def line_of(node: ast.AST) -> int:
    """The line of a node."""
    return int(getattr(node, "lineno", 0))
