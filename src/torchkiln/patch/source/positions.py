"""Calls of functions that make masks, without the positions that a model counts itself.

Without a cache, the functions that make masks search ``position_ids`` for packed sequences. Under
``torch.compile`` the values of ``position_ids`` are unknown, so they make a dense mask. Positions
that the forward makes itself, ``torch.arange`` of one sequence, contain no packed sequences.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchkiln.patch.source.loss_calls import assigned

POSITIONS = "position_ids"
"""The argument with the positions."""

GIVEN = "_kiln_positions"
"""The variable of a rewritten forward with the caller's positions; None without any."""

MAKERS = (
    *("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"),
    "create_recurrent_attention_mask",
)
"""The functions that use the positions to find packed sequences, or not at all."""


def rewrite_positions(node: ast.FunctionDef, scope: Mapping[str, Any]) -> bool:
    """Rewrites a forward whose masks get the positions that it counts; returns whether it did.

    ``scope`` has the globals of the forward.
    """
    blocks = [part for part in node.body if isinstance(part, ast.If) and counts(part, node, scope)]
    uses = [*arguments(node, scope), *entries(node, scope)]
    if len(blocks) != 1 or not uses:
        return False
    (block,) = blocks
    inside = [name for name in names(block, POSITIONS) if not isinstance(name.ctx, ast.Load)]
    # the argument itself counts as one assignment
    has_others = [*assigned(node)].count(POSITIONS) != len(inside) + 1
    if has_others or any(use.lineno <= (block.end_lineno or 0) for use in uses):
        return False
    block.body.append(assignment(block, ast.Constant(None)))
    block.orelse = [assignment(block, ast.Name(POSITIONS, ast.Load()))]
    for use in uses:
        use.id = GIVEN
    return True


def assignment(like: ast.stmt, value: ast.expr) -> ast.Assign:
    """The assignment of a value to the variable :data:`GIVEN`."""
    made = ast.Assign([ast.Name(GIVEN, ast.Store())], value)
    return ast.fix_missing_locations(ast.copy_location(made, like))


def names(node: ast.AST, name: str) -> Iterator[ast.Name]:
    """The nodes that name a variable."""
    return (part for part in ast.walk(node) if isinstance(part, ast.Name) and part.id == name)


def counts(node: ast.If, function: ast.FunctionDef, scope: Mapping[str, Any]) -> bool:
    """Whether a branch is ``if position_ids is None:`` and sets consecutive positions."""
    is_own = ast.unparse(node.test) == f"{POSITIONS} is None" and not node.orelse
    if not is_own or scope.get("torch") is not torch or values_of("torch", function):
        return False
    is_counted = False
    for part in node.body:
        if not isinstance(part, ast.Assign) or len(part.targets) != 1:
            return False
        target = part.targets[0]
        if isinstance(target, ast.Name) and target.id == POSITIONS:
            is_counted = is_count(part.value, function, is_counted=is_counted)
            if not is_counted:
                return False
    return is_counted


def values_of(name: str, function: ast.FunctionDef) -> list[ast.expr | None]:
    """The values that a function assigns to a variable; None where it is set in another way."""
    values: list[ast.expr | None] = [
        part.value
        for part in ast.walk(function)
        if isinstance(part, ast.Assign) and [ast.unparse(x) for x in part.targets] == [name]
    ]
    others = [*assigned(function)].count(name) - len(values)
    return values + [None] * others


def is_count(node: ast.expr, function: ast.FunctionDef, *, is_counted: bool) -> bool:
    """Whether an expression is ``torch.arange`` plus a length, with new axes in front."""
    if isinstance(node, ast.Name):
        return is_counted and node.id == POSITIONS
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        lengths = values_of(node.right.id, function) if isinstance(node.right, ast.Name) else []
        is_length = bool(lengths) and all(map(is_length_of_cache, lengths))
        return is_length and is_count(node.left, function, is_counted=is_counted)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if ast.unparse(node.func) == "torch.arange":
        return len(node.args) == 1 and {word.arg for word in node.keywords} <= {"device"}
    is_row = node.func.attr == "unsqueeze" and ast.unparse(node).endswith(".unsqueeze(0)")
    return is_row and is_count(node.func.value, function, is_counted=is_counted)


def is_length_of_cache(node: ast.expr | None) -> bool:
    """Whether an expression is ``cache.get_seq_length() if cache is not None else 0``."""
    return (
        isinstance(node, ast.IfExp)
        and ast.unparse(node.body).endswith(".get_seq_length()")
        and ast.unparse(node.orelse) == "0"
    )


def makes_masks(node: ast.expr, function: ast.FunctionDef, scope: Mapping[str, Any]) -> bool:
    """Whether an expression is a function that makes masks, or a choice between such functions."""
    if isinstance(node, ast.IfExp):
        return all(makes_masks(part, function, scope) for part in (node.body, node.orelse))
    if not isinstance(node, ast.Name):
        return False
    if values := values_of(node.id, function):
        return all(isinstance(v, ast.IfExp) and makes_masks(v, function, scope) for v in values)
    value = inspect.unwrap(scope[node.id]) if callable(scope.get(node.id)) else None
    return (
        inspect.isfunction(value)
        and value.__module__ == "transformers.masking_utils"
        and value.__name__ in MAKERS
    )


def arguments(node: ast.FunctionDef, scope: Mapping[str, Any]) -> Iterator[ast.Name]:
    """The positions in the arguments of functions that make masks."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and makes_masks(part.func, node, scope):
            for word in part.keywords:
                if word.arg == POSITIONS and isinstance(word.value, ast.Name):
                    yield from names(word.value, POSITIONS)


def entries(node: ast.FunctionDef, scope: Mapping[str, Any]) -> Iterator[ast.Name]:
    """The positions in dicts that only functions that make masks get as arguments."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Assign) or not isinstance(part.value, ast.Dict):
            continue
        (target, *others) = part.targets
        if others or not isinstance(target, ast.Name) or not is_for_masks(target.id, node, scope):
            continue
        for key, value in zip(part.value.keys, part.value.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == POSITIONS:
                yield from names(value, POSITIONS) if isinstance(value, ast.Name) else ()


def is_for_masks(
    name: str, node: ast.FunctionDef, scope: Mapping[str, Any], *, may_copy: bool = True
) -> bool:
    """Whether all reads of a dict and its copies are arguments of functions that make masks."""
    allowed: set[ast.AST] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and makes_masks(part.func, node, scope):
            allowed |= {word.value for word in part.keywords if word.arg is None}
        elif isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store):
            allowed.add(part.value)
        elif isinstance(part, ast.Assign) and ast.unparse(part.value) == f"{name}.copy()":
            copy, *others = map(ast.unparse, part.targets)
            if may_copy and not others and is_for_masks(copy, node, scope, may_copy=False):
                allowed |= {*names(part.value, name)}
    reads = (place for place in names(node, name) if isinstance(place.ctx, ast.Load))
    return all(place in allowed for place in reads)
