"""Dropouts before residual sums as one op, in the forward of a module."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.nn.plain import has_hooks
from torchkiln.patch.formula.linear import is_plain, is_tracing
from torchkiln.patch.source.code import blocks
from torchkiln.patch.source.layer import call_of


def is_dropout(module: Any) -> bool:
    """Whether a module is torch's dropout of single elements."""
    return type(module) is nn.Dropout and "forward" not in vars(module)


def drops(dropout: Any, a: Any, b: Any) -> bool:
    """Whether :func:`torchkiln.dropout_add` takes ``dropout(a) + b``.

    Under ``torch.compile`` Inductor fuses the two.
    """
    if not is_dropout(dropout) or not dropout.training or not 0 < dropout.p < 1:
        return False
    if dropout.inplace or has_hooks(dropout) or torch.compiler.is_compiling() or is_tracing():
        return False
    return same_plain(a, b)


def same_plain(a: Any, b: Any) -> bool:
    """Whether both are plain tensors of one shape, dtype and device."""
    if type(a) is not Tensor or type(b) is not Tensor or not is_plain(a):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def rewrite_dropouts(node: ast.FunctionDef, helper: str, dropouts: Collection[str]) -> list[str]:
    """Pass dropouts of a summand to the helper, which has norm and summands as arguments.

    ``helper(norm, self.dropout(a), b)`` becomes ``helper(norm, a, b, left=self.dropout)``; so does
    ``x = self.dropout(a)`` before a statement that calls the helper with ``x`` and has no other use
    of it. Returns the names of the dropouts.
    """
    found: list[str] = []
    for block in blocks(node):
        for previous, statement in zip([None, *block], block, strict=False):
            found += rewrite_statement(previous, statement, helper, dropouts)
    return list(dict.fromkeys(found))


def rewrite_statement(
    previous: ast.stmt | None, statement: ast.stmt, helper: str, dropouts: Collection[str]
) -> Iterator[str]:
    """Rewrite the calls of the helper in one statement."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return)):
        return
    for call in ast.walk(statement):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != helper or call.keywords:
            continue
        for side, index in (("left", 1), ("right", 2)):
            summand = call.args[index]
            if isinstance(summand, ast.Name) and is_last_use(statement, summand.id):
                is_set = targets_of(previous) == [summand.id]
                dropped = getattr(previous, "value", None) if is_set else None
            else:
                dropped = summand
            own = call_of(dropped, dropouts)
            if own is not None:
                assert isinstance(dropped, ast.Call)
                if dropped is summand:
                    call.args[index] = own[1]
                else:
                    assert isinstance(previous, ast.Assign)
                    previous.value = own[1]
                call.keywords.append(ast.keyword(side, dropped.func))
                yield own[0]
                break


def targets_of(statement: ast.stmt | None) -> list[str]:
    """The variables that an assignment sets."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = [
        part
        for target in targets
        for part in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]
    return [part.id for part in names if isinstance(part, ast.Name)]


def is_last_use(statement: ast.stmt, name: str) -> bool:
    """Whether a statement reads a variable once, and nothing behind it does."""
    uses = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name]
    reads = sum(isinstance(use.ctx, ast.Load) for use in uses)
    return reads == 1 and (isinstance(statement, ast.Return) or name in targets_of(statement))
