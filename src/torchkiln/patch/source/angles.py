"""Modules that return cos and sin with each factor twice, for :func:`torchkiln.rope`.

A rotation by both halves of a head reads all columns of cos; the op reads the first half. Whether
both halves are equal is no property of the rotation. So the forward that makes cos and sin is
rewritten to record its results, if its source shows that the halves are equal.
"""

from __future__ import annotations

import ast
import itertools
import weakref
from collections.abc import Collection
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from torchkiln.patch.source.dropout import is_read
from torchkiln.patch.source.layer import captured
from torchkiln.patch.source.loss_calls import assigned, known_value

ANGLES = "_kiln_angles"
"""The helper in rewritten source: returns its first argument, cos and sin."""

METHODS = frozenset(("cos", "sin", "to", "float", "double", "half", "bfloat16", "type_as"))
"""Methods that compute each element from one element."""

KNOWN: dict[int, tuple[weakref.ref[Tensor], str]] = {}
"""The recorded cos and sin by id. Copies, views and changed tensors are not recorded."""


def noted(results: tuple[Any, Any], factors: str, *scales: Any) -> tuple[Any, Any]:
    """Note that cos and sin have each factor twice, if they were only scaled by numbers."""
    if is_compiling() and not is_dynamo_compiling():
        return results
    if all(type(scale) in (int, float) for scale in scales):
        for x in results:
            note(x, factors)
    return results


def note(x: Any, factors: str) -> None:
    """Note a tensor by its id; under Dynamo, where tensors have no id, set an attribute."""
    if is_dynamo_compiling():
        if type(x) is Tensor:
            x._kiln_factors = factors, trace_number()  # type: ignore[attr-defined]
    elif type(x) is Tensor and not x.is_inference() and x._version == 0:
        KNOWN[id(x)] = weakref.ref(x, partial(forget, id(x))), factors


NUMBERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
NEXT = itertools.count()


def trace_number() -> int:
    """The number of Dynamo's trace.

    A noted tensor that leaves the graph keeps its attribute, even if the tensor is changed later:
    the attribute counts only in the trace that set it.
    """
    context = torch._guards.TracingContext.get()
    if context not in NUMBERS:
        NUMBERS[context] = next(NEXT)
    return NUMBERS[context]


# The mark of torch.compiler.assume_constant_result; torchkiln.patch.table has the reason.
trace_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def changes(x: Tensor) -> Tensor:
    """An empty tensor with a row for each change of ``x`` in place, or one row in inference mode.

    In a trace its shape is known. Nothing uses it, so that no code is made of it.
    """
    return x.new_empty(1 if x.is_inference() else x._version, 0)


def define_changes() -> None:
    """Define the op once in a process: a second import finds the op of the first."""
    space: Any = torch.ops.torchkiln
    if hasattr(space, "_changes"):
        return
    library = torch.library.Library("torchkiln", "FRAGMENT")
    library.define("_changes(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CompositeExplicitAutograd", "Meta"):
        library.impl("_changes", changes, key)
    space._kiln_library = library  # the op lives as long as this object


define_changes()


def forget(key: int, _: weakref.ref[Tensor]) -> None:
    """Remove the record of a tensor that was freed."""
    KNOWN.pop(key, None)


def factors_of(x: Tensor) -> str:
    """The columns of cos or sin that are equal: ``halves``, ``neighbours``, or "" if unknown.

    Known for a recorded tensor that was not changed since. A tensor that requires a gradient counts
    as unknown: the op reads only one of two equal columns, so the other would get no gradient.
    """
    if is_dynamo_compiling():
        factors, number = getattr(x, "_kiln_factors", ("", -1))
        if not factors or number != trace_number() or x.requires_grad:
            return ""
        return "" if torch.ops.torchkiln._changes.default(x).shape[0] else factors
    known, factors = KNOWN.get(id(x), (None, ""))
    if known is None or known() is not x or x.is_inference() or x.requires_grad:
        return ""
    return factors if x._version == 0 else ""


def rewrite_angles(
    node: ast.FunctionDef, function: FunctionType, properties: Collection[str]
) -> str:
    """Rewrite ``return cos, sin`` to record both; returns which columns are equal, or ""."""
    reader = Reader(node, function, properties)
    if not reader.block(node.body) or len(reader.returned) != 1:
        return ""
    ((statement, factors),) = reader.returned
    assert statement.value is not None
    arguments = [statement.value, ast.Constant(factors), *reader.scales]
    statement.value = ast.copy_location(
        ast.Call(ast.Name(ANGLES, ast.Load()), arguments, []), statement.value
    )
    ast.fix_missing_locations(statement)
    return factors


class Reader:
    """Follows variables that hold each factor twice through the statements of a forward.

    No other statement may read them: it could change a tensor in place.
    """

    def __init__(
        self, node: ast.FunctionDef, function: FunctionType, properties: Collection[str]
    ) -> None:
        self.own = list(assigned(node))
        self.globals = function.__globals__
        self.properties = properties
        self.closed = captured(node)
        self.factors: dict[str, str] = {}
        self.scales: list[ast.expr] = []
        self.returned: list[tuple[ast.Return, str]] = []

    def block(self, statements: list[ast.stmt]) -> bool:
        """Read statements; returns whether none could change the variables in place."""
        return all(map(self.statement, statements))

    def statement(self, node: ast.stmt) -> bool:
        """Read a statement; False if it could change the variables."""
        if isinstance(node, ast.With):
            outside = [part for item in node.items for part in ast.walk(item)]
            return not self.reads(outside) and self.block(node.body)
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            (target,) = node.targets
            found = self.of(node.value)
            if found and isinstance(target, ast.Name) and target.id not in self.closed:
                self.factors[target.id] = found
                return True
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            both = [self.of(part) for part in node.value.elts]
            if len(both) == 2 and both[0] and both[0] == both[1]:
                self.returned.append((node, both[0]))
                return True
        parts = list(ast.walk(node))
        if self.reads(parts):
            return False
        stores = {part.id for part in parts if isinstance(part, ast.Name)}
        self.factors = {n: factors for n, factors in self.factors.items() if n not in stores}
        return True

    def reads(self, parts: list[ast.AST]) -> bool:
        """Whether code reads or changes one of the variables."""
        changed = [part.target for part in parts if isinstance(part, ast.AugAssign)]
        names = [part for part in parts if isinstance(part, ast.Name)]
        read = [name for name in names if isinstance(name.ctx, ast.Load)]
        return any(getattr(part, "id", None) in self.factors for part in (*read, *changed))

    def of(self, node: ast.expr) -> str:
        """The columns of an expression that are equal: ``halves``, ``neighbours`` or ""."""
        if isinstance(node, ast.Name):
            return self.factors.get(node.id, "")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                found = self.of(one)
                if found and self.is_scale(other):
                    self.scales.append(other)
                    return found
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return ""
        if self.is_torch(node.func.value):
            return self.of_function(node.func.attr, node)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if node.func.attr in METHODS and all(map(is_read, arguments)):
            return self.of(node.func.value)
        return ""

    def of_function(self, name: str, node: ast.Call) -> str:
        """The columns of a torch function's result that are equal, as in :meth:`of`."""
        if name in {"cos", "sin"} and len(node.args) == 1 and not node.keywords:
            return self.of(node.args[0])
        if not node.args or any(keyword.arg != "dim" for keyword in node.keywords):
            return ""
        first = node.args[0]
        further = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
        others = list(map(ast.unparse, further))
        if name == "cat" and isinstance(first, (ast.Tuple, ast.List)):
            names = [part.id for part in first.elts if isinstance(part, ast.Name)]
            is_twice = len(first.elts) == len(names) == 2 and names[0] == names[1]
            return "halves" if is_twice and others == ["-1"] else ""
        is_each = name == "repeat_interleave" and isinstance(first, ast.Name)
        return "neighbours" if is_each and others == ["2", "-1"] else ""

    def is_torch(self, node: ast.expr) -> bool:
        """Whether an expression is the module ``torch``."""
        return known_value(node, self.globals, set(self.own)) is torch

    def is_scale(self, node: ast.expr) -> bool:
        """Whether an expression is a variable that is set once, or a plain attribute of self."""
        if isinstance(node, ast.Attribute):
            is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            return is_self and node.attr not in self.properties
        if isinstance(node, ast.Name):
            return self.own.count(node.id) == 1
        return isinstance(node, ast.Constant)
