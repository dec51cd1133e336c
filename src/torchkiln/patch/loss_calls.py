"""Torch's losses in the forward of a module, as calls of :func:`torchkiln.cross_entropy`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from torchkiln.nn.cross_entropy import CrossEntropyLoss
from torchkiln.ops.cross_entropy import cross_entropy

OPTIONS = ("weight", "ignore_index", "reduction", "label_smoothing")
"""The options that torch's losses and ours have."""


def made_loss(*args: Any, **options: Any) -> nn.Module:
    """``torch.nn.CrossEntropyLoss`` with these arguments, as our op if it has them."""
    is_ours = len(args) <= 1 and all(name in OPTIONS for name in options)
    return (CrossEntropyLoss if is_ours else nn.CrossEntropyLoss)(*args, **options)


def called_loss(*args: Any, **options: Any) -> Tensor:
    """``torch.nn.functional.cross_entropy`` with these arguments, as our op if it has them."""
    names = ("input", "target", *OPTIONS)
    is_ours = len(args) <= 3 and all(name in names for name in options)
    loss: Tensor = (cross_entropy if is_ours else F.cross_entropy)(*args, **options)
    return loss


HELPERS: dict[object, str] = {
    nn.CrossEntropyLoss: "_kiln_made_loss",
    F.cross_entropy: "_kiln_called_loss",
}
"""The helpers in rewritten source that replace torch's losses."""

SCOPE: dict[str, Callable[..., Any]] = {
    "_kiln_made_loss": made_loss,
    "_kiln_called_loss": called_loss,
}


def names_of(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names of globals and attributes in the forward of a class."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code.co_names if code is not None else ()


def may_call(cls: type[nn.Module]) -> bool:
    """Whether the forward of a class may call a loss of torch."""
    return not {"CrossEntropyLoss", "cross_entropy"}.isdisjoint(names_of(cls))


def rewrite_losses(node: ast.FunctionDef, function: FunctionType) -> int:
    """Rewrite calls of torch's losses; returns their number."""
    rewriter = Losses(function)
    rewriter.visit(node)
    return rewriter.found


class Losses(ast.NodeTransformer):
    """Rewrites ``CrossEntropyLoss(...)`` and ``cross_entropy(...)``, by what the names are."""

    def __init__(self, function: FunctionType) -> None:
        self.globals: Mapping[str, Any] = function.__globals__
        self.locals = (*function.__code__.co_varnames, *function.__code__.co_cellvars)
        self.found = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call."""
        self.generic_visit(node)
        value = self.value(node.func)
        for original, helper in HELPERS.items():
            if value is original:
                node.func = ast.copy_location(ast.Name(helper, ast.Load()), node.func)
                self.found += 1
        return node

    def value(self, node: ast.expr) -> object:
        """What a name of a global, or an attribute of a module, is; None for other expressions."""
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            return getattr(owner, node.attr, None) if inspect.ismodule(owner) else None
        if isinstance(node, ast.Name) and node.id not in self.locals:
            return self.globals.get(node.id)
        return None
