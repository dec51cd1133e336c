"""Formulas as trees: read from text, written as C++, computed by torch, differentiated."""

from __future__ import annotations

import ast
import functools
import math
import textwrap
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.jit.formula.functions import ALIASES, FUNCTIONS, NAMED
from torchkiln.jit.formula.parse import parsed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
COMPARISONS = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}
FUNCTION_LIST = textwrap.fill(
    ", ".join(NAMED), width=80, initial_indent="  ", subsequent_indent="  "
)
"""All functions, one per line, for error messages."""

MOST_LEVELS = 100
"""The deepest formula. Its derivatives are deeper, and Python's stack has 1000 levels."""
TOO_DEEP = (
    f"got a formula of more than {MOST_LEVELS} levels, expected fewer; make two ops of it, or pass"
    " a functor in C++"
)


class Node:
    """A part of a formula: a name, a number or a call."""


@dataclass(frozen=True)
class Name(Node):
    """An argument: an element of a tensor, or a number."""

    name: str


@dataclass(frozen=True)
class Number(Node):
    """A constant of a formula."""

    value: float


@dataclass(frozen=True)
class Call(Node):
    """A function of subexpressions. Operators such as + and < are functions, too."""

    function: str
    arguments: tuple[Node, ...]


class ExpressionError(ValueError):
    """An expression that is no formula; the caller adds the name of the argument."""


def parse(text: str, argument: str = "expression") -> Node:
    """Reads a formula in Python's notation.

    Args:
        text: the expression.
        argument: the argument of ``jit.elementwise`` that contains the expression, for errors.
    """
    try:
        tree = parsed(text.strip(), "eval").body
        _require_depth(tree)
        node = _read(tree, text)
        if _is_condition(node):
            raise ExpressionError(f"got {text!r}, expected a number, not a comparison")
        _require_kinds(node, text)
    except SyntaxError as error:
        raise ValueError(
            f"torchkiln.jit.elementwise: {argument}: got {text!r}, expected a Python expression"
            f" ({error.msg})"
        ) from None
    except (RecursionError, MemoryError):  # raised by the parser
        raise ValueError(f"torchkiln.jit.elementwise: {argument}: {TOO_DEEP}") from None
    except ExpressionError as error:
        raise ValueError(f"torchkiln.jit.elementwise: {argument}: {error}") from None
    return node


def _require_depth(tree: ast.expr) -> None:
    """Raises for a formula that is nested too deeply; a sum of n terms has n levels."""
    level: list[ast.AST] = [tree]
    for _ in range(MOST_LEVELS):
        level = [part for node in level for part in ast.iter_child_nodes(node)]
    if any(isinstance(node, ast.expr) for node in level):
        raise ExpressionError(TOO_DEEP)


def _number(value: float) -> Number:
    try:
        return Number(float(value))
    except OverflowError:
        raise ExpressionError(
            f"got an integer of {len(str(abs(value)))} digits, expected at most 1.8e308"
        ) from None


def _is_condition(node: Node) -> bool:
    return isinstance(node, Call) and FUNCTIONS[node.function].condition


def _require_kinds(node: Node, text: str) -> None:
    """Raises unless each condition of ``where`` is a comparison, and no other part is one."""
    if not isinstance(node, Call):
        return
    for i, argument in enumerate(node.arguments):
        is_choice = node.function == "where" and i == 0
        if _is_condition(argument) != is_choice:
            wanted = "a comparison such as x > 0" if is_choice else "a number, not a comparison"
            raise ExpressionError(
                f"got argument {i + 1} of {node.function} in {text!r}, expected {wanted}"
            )
        _require_kinds(argument, text)


def _read(tree: ast.expr, text: str) -> Node:  # noqa: PLR0911  one return for each kind
    def read(*parts: ast.expr) -> tuple[Node, ...]:
        return tuple(_read(part, text) for part in parts)

    match tree:
        case ast.Name(id=name):
            return Name(name)
        case ast.Constant(value=float() | int() as value) if not isinstance(value, bool):
            return _number(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float() | int() as value)):
            return _number(-value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return Call("neg", read(operand))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _read(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return Call(BINARY[type(op)], read(left, right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            return Call(COMPARISONS[type(op)], read(left, right))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _call_by_name("where", read(test, body, orelse), text)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _call_by_name(name, read(*arguments), text)
    part = ast.get_source_segment(text.strip(), tree)
    raise ExpressionError(
        f"got {part!r} in {text!r}, expected names, numbers, + - * / **, one comparison,"
        f" a if b else c, or one of these functions by its name alone:\n{FUNCTION_LIST}"
    )


def _call_by_name(name: str, arguments: tuple[Node, ...], text: str) -> Node:
    function = ALIASES.get(name, name)
    if function not in NAMED:
        close = get_close_matches(name, NAMED, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ExpressionError(
            f"got function {name!r} in {text!r}, expected one of those below{hint}\n{FUNCTION_LIST}"
        )
    arity = FUNCTIONS[function].arity
    if len(arguments) != arity:
        raise ExpressionError(
            f"got {len(arguments)} arguments of {name} in {text!r}, expected {arity}"
        )
    return Call(function, arguments)


def names_in(node: Node) -> Iterator[str]:
    """The names in a formula from left to right, with repetitions."""
    if isinstance(node, Name):
        yield node.name
    elif isinstance(node, Call):
        for argument in node.arguments:
            yield from names_in(argument)


ZERO, ONE = Number(0.0), Number(1.0)


def call(function: str, *arguments: Node) -> Node:
    """A call; x * 0, x * 1, x + 0 and a choice between equal parts are simplified."""
    if function == "mul":
        if ZERO in arguments:
            return ZERO
        if ONE in arguments:
            return arguments[1] if arguments[0] == ONE else arguments[0]
    if function == "add" and ZERO in arguments:
        return arguments[1] if arguments[0] == ZERO else arguments[0]
    if function == "where" and arguments[1] == arguments[2]:
        return arguments[1]
    return Call(function, arguments)


@functools.cache
def _slopes(function: str) -> tuple[Node, ...]:
    texts = FUNCTIONS[function].slopes
    return tuple(_read(parsed(text, "eval").body, text) for text in texts)


def substitute(node: Node, parts: Mapping[str, Node]) -> Node:
    """The formula with its names replaced by the given expressions."""
    if isinstance(node, Name):
        return parts.get(node.name, node)
    if isinstance(node, Call):
        return call(node.function, *(substitute(argument, parts) for argument in node.arguments))
    return node


def slope(node: Node, name: str) -> Node:
    """The derivative with respect to a name, by the chain rule."""
    if isinstance(node, Name):
        return ONE if node.name == name else ZERO
    if not isinstance(node, Call):
        return ZERO
    parts = dict(zip("abc", node.arguments, strict=False))
    total: Node = ZERO
    for argument, outer in zip(node.arguments, _slopes(node.function), strict=True):
        inner = slope(argument, name)
        if inner != ZERO:
            total = call("add", total, call("mul", substitute(outer, parts), inner))
    return total


def magnitude(node: Node) -> Node:
    """A bound on the intermediate values, to which rounding errors are proportional.

    The magnitude of a sum is the sum of the magnitudes of its terms. The magnitude of another
    function is its absolute value plus, per argument, magnitude times absolute derivative.
    """
    if not isinstance(node, Call):
        return Call("abs", (node,))
    if FUNCTIONS[node.function].condition:
        return node
    if node.function in ("add", "sub"):
        return call("add", *map(magnitude, node.arguments))
    parts = dict(zip("abc", node.arguments, strict=False))
    total: Node = Call("abs", (node,))
    for argument, outer in zip(node.arguments, _slopes(node.function), strict=True):
        if next(names_in(argument), None) is not None and outer != ZERO:
            steepness = Call("abs", (substitute(outer, parts),))
            total = call("add", total, call("mul", steepness, magnitude(argument)))
    return total


def _cuda_number(value: float) -> str:
    if math.isfinite(value):
        return f"C({value!r})"
    bits = "0x7f800000" if value > 0 else "0xff800000"  # NVRTC has no INFINITY
    return f"C(__int_as_float({bits}))"


def cuda_of(nodes: Mapping[str, Node]) -> str:
    """C++ statements that assign each result; equal parts are computed once.

    Args:
        nodes: the formula for each result. In C++ names end with an underscore: ``x_`` for ``x``.
    """
    lines: list[str] = []
    known: dict[Node, str] = {}

    def write(node: Node) -> str:
        if isinstance(node, Name):
            return f"{node.name}_"
        if isinstance(node, Number):
            return _cuda_number(node.value)
        if node not in known:
            assert isinstance(node, Call)
            arguments = [write(argument) for argument in node.arguments]
            function = FUNCTIONS[node.function]
            known[node] = f"part{len(known)}"
            kind = "bool" if function.condition else "C"
            text = function.cuda.format(*arguments)
            lines.append(f"const {kind} {known[node]} = {text};")
        return known[node]

    for result, node in nodes.items():
        text = write(node)
        lines.append(f"{result} = {text};")
    return "\n    ".join(lines)


def compute(node: Node, values: Mapping[str, Any], dtype: torch.dtype, device: Any) -> Tensor:
    """The value of a formula by torch functions.

    Args:
        node: the formula.
        values: a tensor of ``dtype`` or a number for each name.
        dtype: the dtype of the result.
        device: the device of constants.
    """
    known: dict[Node, Any] = {}

    def tensor(value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        return torch.full((), value, dtype=dtype, device=device)

    def run(node: Node) -> Any:
        if isinstance(node, Name):
            return values[node.name]
        if isinstance(node, Number):
            return node.value
        if node not in known:
            assert isinstance(node, Call)
            function = FUNCTIONS[node.function]
            arguments = [run(argument) for argument in node.arguments]
            if not function.numbers or not isinstance(arguments[0], Tensor):
                arguments = [tensor(argument) for argument in arguments]
            known[node] = function.torch(*arguments)
        return known[node]

    return tensor(run(node))
