"""Torch's losses in the forward of a module, as calls of :func:`torchkiln.cross_entropy`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from torchkiln.ops.cross_entropy import cross_entropy
from torchkiln.patch.table import stays

OPTIONS = ("weight", "ignore_index", "reduction", "label_smoothing")
"""The options that torch's losses and ours have."""

NAMES = {"CrossEntropyLoss", "cross_entropy"}
"""The names of torch's losses."""


def fits(logits: Any, target: Any, weight: Any) -> bool:
    """Whether the op takes these tensors; torch's loss also takes other dtypes, and DTensors."""
    if not isinstance(logits, Tensor) or not isinstance(target, Tensor):
        return False
    if any(type(x).__module__.startswith("torch.distributed") for x in (logits, target)):
        return False
    is_plain = weight is None or (weight.dtype == logits.dtype and not weight.requires_grad)
    has_classes = logits.dim() > 1 and logits.is_floating_point()
    has_indices = target.dtype == torch.int64 and target.dim() == logits.dim() - 1
    has_shares = target.dtype == logits.dtype and target.shape == logits.shape
    has_target = (has_indices or has_shares) and target.device == logits.device
    return is_plain and has_classes and has_target


def called_loss(input: Any, target: Any, weight: Any = None, *args: Any, **options: Any) -> Tensor:
    """``torch.nn.functional.cross_entropy``, computed by our op if it takes these arguments."""
    is_ours = not args and all(name in OPTIONS for name in options)
    smoothing = options.get("label_smoothing", 0.0)
    is_smoothed = isinstance(smoothing, float) and 0 <= smoothing <= 1
    is_ours = is_ours and is_smoothed and fits(input, target, weight)
    if is_ours and not (is_compiling() and not stays("cross_entropy", input, dim=1)):
        return cross_entropy(input, target, weight, **options)
    loss: Tensor = F.cross_entropy(input, target, weight, *args, **options)
    return loss


def module_loss(module: nn.CrossEntropyLoss, logits: Tensor, target: Tensor) -> Tensor:
    """The loss of torch's module, computed by our op if it takes the tensors."""
    return called_loss(
        logits,
        target,
        module.weight,
        ignore_index=module.ignore_index,
        reduction=module.reduction,
        label_smoothing=module.label_smoothing,
    )


class Loss(nn.CrossEntropyLoss):
    """Torch's module, which calls the op if the op takes the tensors."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        return module_loss(self, input, target)


def made_loss(*args: Any, **options: Any) -> nn.CrossEntropyLoss:
    """A ``torch.nn.CrossEntropyLoss``, which calls our op if that has all these arguments."""
    is_ours = len(args) <= 1 and all(name in OPTIONS for name in options)
    return (Loss if is_ours else nn.CrossEntropyLoss)(*args, **options)


LOSS = "_kiln_loss"
"""The helper in rewritten source: its argument is the called function or class."""


def loss_of(called: Any) -> Any:
    """Our loss if the value is torch's; else the value, to which the name may be bound."""
    if called is F.cross_entropy:
        return called_loss
    return made_loss if called is nn.CrossEntropyLoss else called


def names_of(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names of globals and attributes in the forward of a class."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code.co_names if code is not None else ()


def may_call(cls: type[nn.Module]) -> bool:
    """Whether the forward of a class may call a loss of torch."""
    return not NAMES.isdisjoint(names_of(cls))


def rewrite_losses(node: ast.FunctionDef, function: FunctionType) -> int:
    """Rewrite calls of torch's losses; returns their number."""
    rewriter = Losses(function.__globals__, set(assigned(node)))
    rewriter.visit(node)
    return rewriter.found


def assigned(node: ast.FunctionDef) -> Iterator[str]:
    """The names that a function binds: arguments, variables and imports."""
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            yield part.arg
        elif isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            yield part.id
        elif isinstance(part, (ast.FunctionDef, ast.ClassDef)):
            yield part.name
        elif isinstance(part, ast.alias):
            yield (part.asname or part.name).partition(".")[0]


class Losses(ast.NodeTransformer):
    """Rewrites ``CrossEntropyLoss(...)`` and ``cross_entropy(...)`` if the names are torch's."""

    def __init__(self, scope: Mapping[str, Any], own: set[str]) -> None:
        self.globals = scope
        self.own = own
        self.found = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Rewrites a call of torch's loss."""
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        if name in NAMES and has_fixed_index(node):
            value = known_value(node.func, self.globals, self.own)
            if value is F.cross_entropy or value is nn.CrossEntropyLoss:
                made = ast.Call(ast.Name(LOSS, ast.Load()), [node.func], [])
                node.func = ast.fix_missing_locations(ast.copy_location(made, node.func))
                self.found += 1
        return node


def known_value(node: ast.expr, scope: Mapping[str, Any], own: Collection[str]) -> Any:
    """The value of a global or of an attribute of a module; None for other expressions.

    ``own`` are the names that the function binds.
    """
    if isinstance(node, ast.Attribute):
        owner = known_value(node.value, scope, own)
        return vars(owner).get(node.attr) if inspect.ismodule(owner) else None
    return scope.get(node.id) if isinstance(node, ast.Name) and node.id not in own else None


def has_fixed_index(node: ast.Call) -> bool:
    """Whether ``ignore_index`` is no variable, for which torch.compile makes a graph per value."""
    given = [keyword.value for keyword in node.keywords if keyword.arg == "ignore_index"]
    kinds = (ast.Constant, ast.UnaryOp, ast.Attribute)
    return all(isinstance(value, kinds) for value in given)
