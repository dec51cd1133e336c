"""Liger's functions take the arguments that the benchmark passes.

Its modules need Triton, so their source is read.
"""

from __future__ import annotations

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from torchkiln.bench.case import cases
from torchkiln.bench.peers import Refused, liger
from torchkiln.testing import SPECS

PACKAGE = find_spec(liger.PACKAGE)
KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD


def signature(module: str, name: str) -> inspect.Signature:
    """The parameters of ``Class.apply``: its own, or those of ``forward`` without the context."""
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    folder = Path(PACKAGE.origin).parent
    source = folder.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    owner = next(node for node in classes if node.name == name.split(".", maxsplit=1)[0])
    functions = {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}
    found = functions.get("apply") or functions["forward"]
    names = [each.arg for each in found.args.args]
    required = len(names) - len(found.args.defaults)
    parameters = [
        inspect.Parameter(each, KIND, default=None if i >= required else inspect.Parameter.empty)
        for i, each in enumerate(names)
    ]
    return inspect.Signature(parameters if "apply" in functions else parameters[1:])


@pytest.mark.skipif(PACKAGE is None, reason="liger-kernel is not installed")
@pytest.mark.parametrize("name", liger.FUNCTIONS)
def test_the_arguments_fit(name: str) -> None:
    module, function, adapt = liger.FUNCTIONS[name]
    theirs = signature(module, function)
    calls: list[inspect.BoundArguments] = []

    def apply(*args: Any) -> Any:
        calls.append(theirs.bind(*args))
        return torch.zeros(2), torch.zeros(2)

    spec = next(spec for spec in SPECS if spec.name == name)
    for case in cases(spec, torch.device("cpu"), torch.float32, (16, 32)):
        try:
            adapt(apply, *case.sample.args, **case.sample.kwargs)
        except Refused:
            continue
    assert calls
    for call in calls:
        given = call.arguments
        if name == "linear_kl":
            assert given["shift_labels"] is None
            assert given["jsd_beta"] in {0.0, 0.5}
            assert given["student_weight"].shape == given["teacher_weight"].shape
        if name == "linear_logprob":
            assert given["return_entropy"] is True
            assert given["_input"].shape[:1] == given["target"].shape
        if name == "linear_cross_entropy":
            assert given["accum_dtype"] == torch.float32
            assert given["reduction"] in {"mean", "sum", "none"}
