"""Dropouts before residual sums as one op, in the forward of a module."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from torchkiln.nn.plain import has_hooks
from torchkiln.patch.formula.linear import is_plain, is_tracing
from torchkiln.patch.source.code import GUARDS, blocks
from torchkiln.patch.source.layer import call_of, captured, named
from torchkiln.patch.table import is_chosen

DROPOUT = "_kiln_dropout"
"""The variable that holds a dropout between two statements."""


def is_dropout(module: Any) -> bool:
    """Whether a module is torch's dropout of single elements."""
    return type(module) is nn.Dropout and "forward" not in vars(module)


def drops(dropout: Any, a: Any, b: Any) -> bool:
    """Whether :func:`torchkiln.dropout_add` takes ``dropout(a) + b``.

    Under ``torch.compile`` only where it was measured to be faster than Inductor's code.
    """
    if not is_dropout(dropout) or not dropout.training or not 0 < dropout.p < 1:
        return False
    if dropout.inplace or has_hooks(dropout) or is_tracing() or not same_plain(a, b):
        return False
    return not is_compiling() or is_chosen("dropout_add", a, a.shape[-1], unmeasured=False)


def same_plain(a: Any, b: Any) -> bool:
    """Whether both are plain tensors of one shape, dtype and device, and the sum is contiguous."""
    if type(a) is not Tensor or type(b) is not Tensor or not is_plain(a):
        return False
    same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return same and a.is_contiguous() and b.is_contiguous()


def rewrite_dropouts(node: ast.FunctionDef, helper: str, dropouts: Collection[str]) -> list[str]:
    """Pass dropouts of a summand to the helper, which has norm and summands as arguments.

    ``helper(norm=norm, a=self.dropout(x), b=y)`` becomes ``helper(norm=norm, left=self.dropout,
    a=x, b=y)``. A statement ``a = self.dropout(x)`` before the call of the helper is rewritten,
    too, if ``a`` has no other use. Returns the names of the dropouts.
    """
    found: list[str] = []
    closed = captured(node)
    for block in blocks(node):
        for statement in block:
            for call in helper_calls(statement, helper):
                found += rewrite_call(call, dropouts)
    for block in blocks(node, but=GUARDS):
        for previous, statement in pairwise(block):
            found += rewrite_pair(previous, statement, helper, dropouts, closed)
    return list(dict.fromkeys(found))


def helper_calls(statement: ast.stmt, helper: str) -> list[ast.Call]:
    """The calls of the helper in a statement without blocks."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
        return []
    calls = [part for part in ast.walk(statement) if isinstance(part, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == helper]


SIDES = {"a": "left", "b": "right"}
"""The argument of the helper that takes the dropout of each summand."""


def rewrite_call(call: ast.Call, dropouts: Collection[str]) -> Iterator[str]:
    """Rewrite a dropout that is a summand of the helper.

    The helper calls the dropout after both summands are computed. So the dropout of ``a`` is
    rewritten only if ``b`` is a variable, a constant or an attribute.
    """
    given = {keyword.arg: keyword for keyword in call.keywords}
    for name in ("b", "a"):
        own = call_of(given[name].value, dropouts)
        if own is not None and (name == "b" or is_read(given["b"].value)):
            dropped = given[name].value
            assert isinstance(dropped, ast.Call)
            call.keywords.insert(call.keywords.index(given[name]), keyword(name, dropped.func))
            given[name].value = own[1]
            yield own[0]
            return


def rewrite_pair(
    previous: ast.stmt,
    statement: ast.stmt,
    helper: str,
    dropouts: Collection[str],
    closed: Collection[str],
) -> Iterator[str]:
    """Rewrite ``x = self.dropout(y)`` before a statement that begins with a call of the helper."""
    call = first_call(statement, helper)
    own = call_of(getattr(previous, "value", None), dropouts)
    if call is None or own is None or not isinstance(previous, ast.Assign):
        return
    given = {keyword.arg: keyword for keyword in call.keywords}
    if "left" in given or "right" in given:
        return
    for name, other in (("a", "b"), ("b", "a")):
        summand = given[name].value
        if not isinstance(summand, ast.Name) or not is_read(given[other].value):
            continue
        is_set = [getattr(target, "id", "") for target in previous.targets] == [summand.id]
        if is_set and summand.id not in closed and is_last_use(statement, summand.id):
            assert isinstance(previous.value, ast.Call)
            # The dropout is read before its argument is computed, and the norm after the dropout.
            names = [ast.Name(DROPOUT, ast.Store()), *previous.targets]
            previous.targets = [ast.Tuple(names, ast.Store())]
            previous.value = ast.Tuple([previous.value.func, own[1]], ast.Load())
            call.keywords.append(keyword(name, ast.Name(DROPOUT, ast.Load())))
            if "owner" not in given:
                path = ast.unparse(given["norm"].value).removeprefix("self.")
                call.keywords.remove(given["norm"])
                call.keywords += [ast.keyword(*pair) for pair in named(norm=path).items()]
            for changed in (previous, statement):
                ast.fix_missing_locations(changed)
            yield own[0]
            return


def keyword(summand: str, dropout: ast.expr) -> ast.keyword:
    """The keyword argument of the helper for the dropout of a summand."""
    return ast.keyword(SIDES[summand], dropout)


def first_call(statement: ast.stmt, helper: str) -> ast.Call | None:
    """The call of the helper, if a statement evaluates it before all its other calls."""
    value: Any = getattr(statement, "value", None)
    if not helper_calls(statement, helper):
        return None
    value = value.value if isinstance(value, ast.Subscript) else value
    is_helper = isinstance(value, ast.Call) and getattr(value.func, "id", None) == helper
    return value if is_helper else None


def is_read(node: ast.expr) -> bool:
    """Whether an expression is a variable, a constant or an attribute of one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, (ast.Name, ast.Constant))


def is_last_use(statement: ast.stmt, name: str) -> bool:
    """Whether a statement reads a variable once, and then returns or sets it."""
    uses = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name]
    reads = sum(isinstance(use.ctx, ast.Load) for use in uses)
    is_set = isinstance(statement, ast.Assign) and len(uses) > reads
    return reads == 1 and (isinstance(statement, ast.Return) or is_set)
