"""Norms before the modules that read their results, in the forward of a module.

The forward passes the name of the reading module to the norm. No other code may read the result: it
is the argument of one call, and its variable is set again before another use.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from torchkiln.patch.source.code import GUARDS, blocks
from torchkiln.patch.source.layer import OwnScope, call_of, captured, helper_call
from torchkiln.patch.source.residual import ADD_NORM, NORMED, is_copy, stored
from torchkiln.patch.source.shared import SHARED

NORM = "_kiln_norm"
"""The helper in rewritten source: ``norm(x)``, for a module that reads it."""

READS_ALL = frozenset(("locals", "vars", "eval", "exec", "dir", "globals"))
"""Functions that may read any variable."""


class Fed(NamedTuple):
    """An argument that only layers read; the forward itself reads at most the argument's shape."""

    parameter: str
    is_first: bool
    layers: tuple[str, ...]


def rewrite_feeds(
    node: ast.FunctionDef, norms: Collection[str], readers: Collection[str]
) -> list[tuple[str, str]]:
    """Rewrite norms before calls of readers; returns the names of both."""
    if not norms or not readers or reads_all(node):
        return []
    found: list[tuple[str, str]] = []
    closed = captured(node)
    for block in blocks(node, but=GUARDS):
        for index in range(len(block)):
            found += rewrite_pair(node, block, index, norms, readers, closed)
    inline = Inline(norms, readers)
    inline.generic_visit(node)
    return [*found, *inline.found]


def rewrite_pair(
    node: ast.FunctionDef,
    block: list[ast.stmt],
    index: int,
    norms: Collection[str],
    readers: Collection[str],
    closed: Collection[str],
) -> Iterator[tuple[str, str]]:
    """Rewrite ``y = self.norm(x)`` before ``... = self.reader(y)``, with copies between."""
    first = block[index]
    if not isinstance(first, ast.Assign) or len(first.targets) != 1:
        return
    target = first.targets[0]
    if not isinstance(target, ast.Name) or target.id in closed:
        return
    maker = maker_of(block, index, norms)
    at = next(
        (i for i, one in enumerate(block[index + 1 :], index + 1) if not passes(one, target.id)),
        len(block),
    )
    if maker is None or at == len(block):
        return
    call = reading(block[at], target.id, readers)
    if call is None or not is_dead(node, block, at, target.id):
        return
    name, helper = maker
    to, place = call
    tell(helper, first, to, place)
    yield name, to


def maker_of(
    block: list[ast.stmt], index: int, norms: Collection[str]
) -> tuple[str, ast.Call] | None:
    """The name of the norm that computes a statement's value, and the call of norm or sum."""
    value = getattr(block[index], "value", None)
    call = call_of(value, norms)
    if call is not None and isinstance(value, ast.Call):
        return call[0], value
    if not isinstance(value, ast.Name) or value.id != NORMED:
        return None
    for statement in reversed(block[:index]):
        if NORMED in stored([statement]):
            sum_: ast.Call | None = getattr(statement, "value", None)
            given = {word.arg: word.value for word in sum_.keywords} if sum_ else {}
            norm = given.get("norm")
            if sum_ is not None and isinstance(norm, ast.Constant) and "owner" in given:
                return str(norm.value), sum_
            return None
    return None


def tell(call: ast.Call, at: ast.stmt, to: str, place: int | str | None) -> None:
    """Make a call of a norm name the module that reads the result."""
    given: dict[str, ast.expr] = {"to": ast.Constant(to), "at": ast.Constant(place)}
    if not (isinstance(call.func, ast.Name) and call.func.id == ADD_NORM):
        given = {
            "norm": call.func,
            "x": call.args[0],
            "owner": ast.Name("self", ast.Load()),
            **given,
        }
        call.func, call.args = ast.Name(NORM, ast.Load()), []
    call.keywords += helper_call(NORM, **given).keywords
    ast.fix_missing_locations(ast.copy_location(call, at))


def passes(statement: ast.stmt, variable: str) -> bool:
    """Whether a statement only copies or deletes variables, and not this one."""
    if isinstance(statement, ast.Delete):
        names = [part.id for part in statement.targets if isinstance(part, ast.Name)]
        return len(names) == len(statement.targets) and variable not in names
    return is_copy(statement) and variable not in mentioned(statement)


def mentioned(node: ast.AST) -> list[str]:
    """The variables of a statement, once for each use."""
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]


def reading(
    statement: ast.stmt, variable: str, readers: Collection[str]
) -> tuple[str, int | str | None] | None:
    """The reader that a statement calls with a variable, and the variable's position or name."""
    if not isinstance(statement, (ast.Assign, ast.Return, ast.AnnAssign)):
        return None
    value = statement.value
    sides = [value.left, value.right] if isinstance(value, ast.BinOp) else [value]
    calls = [side for side in sides if isinstance(side, ast.Call)]
    names = [side.id for side in sides if isinstance(side, ast.Name)]
    if len(calls) != 1 or len(calls) + len(names) < len(sides):
        return None
    if len(loads_of(statement, variable)) != 1 or mentioned(calls[0]).count(variable) != 1:
        return None
    place = place_of(calls[0], readers, lambda part: is_name(part, variable))
    return None if place is None else (place[0], place[1])


def loads_of(statement: ast.stmt, variable: str) -> list[ast.AST]:
    """The uses of a variable in a statement, except those that only set it."""
    changed = [part.target for part in ast.walk(statement) if isinstance(part, ast.AugAssign)]
    return [
        part
        for part in ast.walk(statement)
        if is_name(part, variable)
        and (part in changed or not isinstance(getattr(part, "ctx", None), ast.Store))
    ]


def is_name(part: ast.AST, variable: str) -> bool:
    """Whether an expression is this variable."""
    return isinstance(part, ast.Name) and part.id == variable


def place_of(
    call: ast.Call, readers: Collection[str], is_given: Callable[[ast.AST], bool]
) -> tuple[str, int | str | None, ast.expr] | None:
    """The called reader, and place and value of its argument for which ``is_given`` is true."""
    path = ast.unparse(call.func)
    name = path.removeprefix("self.")
    if name == path or name not in readers:
        return None
    if call.args and is_given(call.args[0]):
        alone = len(call.args) == 1 and not call.keywords
        return name, None if alone else 0, call.args[0]
    for word in call.keywords:
        if word.arg is not None and is_given(word.value):
            return name, word.arg, word.value
    return None


def is_dead(node: ast.FunctionDef, block: list[ast.stmt], at: int, variable: str) -> bool:
    """Whether no statement after ``block[at]`` reads the variable before it is set again."""
    if isinstance(block[at], ast.Return) or sets(block[at], variable):
        return True
    for statement in block[at + 1 :]:
        if loads_of(statement, variable):
            return False
        if isinstance(statement, ast.Return) or sets(statement, variable):
            return True
        if any(isinstance(part, (ast.Break, ast.Continue)) for part in ast.walk(statement)):
            return False
    return block is node.body


def sets(statement: ast.stmt, variable: str) -> bool:
    """Whether a statement assigns to a variable, alone or among others."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    parts = [part for one in targets for part in getattr(one, "elts", [one])]
    return any(is_name(part, variable) for part in parts)


def reads_all(node: ast.FunctionDef) -> bool:
    """Whether a function may read variables by other means than their names."""
    return not READS_ALL.isdisjoint(mentioned(node))


class Inline(OwnScope, ast.NodeTransformer):
    """Rewrites ``self.reader(self.norm(x))``."""

    def __init__(self, norms: Collection[str], readers: Collection[str]) -> None:
        self.norms, self.readers = norms, readers
        self.found: list[tuple[str, str]] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Rewrites a call of a norm in a call of a reader."""
        self.generic_visit(node)
        place = place_of(node, self.readers, lambda part: call_of(part, self.norms) is not None)
        if place is None:
            return node
        to, at, inner = place
        call = call_of(inner, self.norms)
        assert call is not None
        assert isinstance(inner, ast.Call)
        self.found.append((call[0], to))
        given: ast.Call = inner
        statement = ast.copy_location(ast.Expr(inner), inner)
        tell(given, statement, to, at)
        return node


def fed_parameter(node: ast.FunctionDef) -> Fed | None:
    """The first argument passed to submodules, if the forward itself reads at most its shape.

    The submodules may be methods.
    """
    names = [arg.arg for arg in [*node.args.posonlyargs, *node.args.args][1:]]
    parents = {child: part for part in ast.walk(node) for child in ast.iter_child_nodes(part)}
    if reads_all(node):
        return None
    for index, name in enumerate(names):
        uses = [part for part in ast.walk(node) if is_name(part, name)]
        readers = [read_by(use, parents) for use in uses]
        if any(readers) and all(reader is not None for reader in readers):
            found = {layer for reader in readers for layer in reader or ()}
            return Fed(name, index == 0, tuple(sorted(found)))
    return None


def read_by(use: ast.AST, parents: dict[ast.AST, ast.AST]) -> tuple[str, ...] | None:
    """The submodules that read a variable; () for a use of its shape, None for other uses."""
    parent = parents[use]
    if isinstance(parent, ast.Attribute):
        return () if parent.attr == "shape" and isinstance(parent.ctx, ast.Load) else None
    if not isinstance(parent, ast.Call):
        return None
    path = ast.unparse(parent.func)
    if path.startswith("self.") and len(parent.args) == 1 and not parent.keywords:
        return (path.removeprefix("self."),)
    is_shared = isinstance(parent.func, ast.Name) and parent.func.id == SHARED
    if not is_shared or parent.args[0] is not use:
        return None
    made = parent.args[1]
    assert isinstance(made, ast.Tuple)
    return tuple(ast.unparse(layer).removeprefix("self.") for layer in made.elts)
