"""Nothing is public without a contract."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import torch

import torchkiln
from torchkiln import _C
from torchkiln.testing import SPECS

ROOT = Path(__file__).resolve().parents[1]

# What the package offers beside ops.
OTHER_FUNCTIONS = {"build_info"}


def registered() -> set[str]:
    """The names of all ops in the namespace."""
    names = torch._C._dispatch_get_all_op_names()
    return {
        n.removeprefix("torchkiln::").split(".")[0] for n in names if n.startswith("torchkiln::")
    }


def test_every_op_has_a_spec() -> None:
    covered = {spec.name for spec in SPECS} | {h for spec in SPECS for h in spec.helpers}
    assert registered() == covered


def test_every_public_function_has_a_spec() -> None:
    functions = {name for name in torchkiln.__all__ if inspect.isroutine(getattr(torchkiln, name))}
    assert functions - OTHER_FUNCTIONS == {spec.name for spec in SPECS}
    for spec in SPECS:
        assert spec.op is getattr(torchkiln, spec.name)
        assert spec.overload.name() == f"torchkiln::{spec.name}"


def test_every_module_has_a_spec() -> None:
    cpu = torch.device("cpu")
    made = {type(spec.module(cpu, torch.float32)) for spec in SPECS if spec.module is not None}
    assert {getattr(torchkiln.nn, name) for name in torchkiln.nn.__all__} == made


def test_public_functions_are_documented() -> None:
    for name in torchkiln.__all__:
        thing = getattr(torchkiln, name)
        if inspect.isroutine(thing) or inspect.isclass(thing):
            assert inspect.getdoc(thing), name
    for name in torchkiln.nn.__all__:
        assert inspect.getdoc(getattr(torchkiln.nn, name)), name


def test_stub_and_extension_agree() -> None:
    """What type checkers are told is what the extension has."""
    stub = ast.parse((ROOT / "src" / "torchkiln" / "_C.pyi").read_text())
    told = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    exported = {name for name in dir(_C) if not name.startswith("_")}
    assert told == exported
    assert {spec.name for spec in SPECS} <= exported
