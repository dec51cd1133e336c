"""Formulas as trees: read from text, written as C++, computed by torch, differentiated."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.jit.formula.functions import FUNCTIONS, OPERATORS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
COMPARED = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}


class Node:
    """A part of a formula."""


@dataclass(frozen=True)
class Name(Node):
    """A tensor's element, or a number that is given when the formula is computed."""

    name: str


@dataclass(frozen=True)
class Number(Node):
    """A number."""

    value: float


@dataclass(frozen=True)
class Call(Node):
    """A function of parts; +, * and < are functions, too."""

    function: str
    arguments: tuple[Node, ...]


def parse(text: str) -> Node:
    """A formula from Python's notation of one."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"torchkiln.jit: expression: got {text!r}: {error.msg}") from None
    node = _read(tree, text)
    if _is_condition(node):
        raise ValueError(f"torchkiln.jit: expression: got {text!r}, expected a number, not a yes")
    _require_kinds(node, text)
    return node


def _is_condition(node: Node) -> bool:
    return isinstance(node, Call) and FUNCTIONS[node.function].condition


def _require_kinds(node: Node, text: str) -> None:
    """Comparisons stand where something is chosen, and nowhere else."""
    if not isinstance(node, Call):
        return
    for i, argument in enumerate(node.arguments):
        chooses = node.function == "where" and i == 0
        if _is_condition(argument) != chooses:
            wanted = "a comparison, such as x > 0" if chooses else "a number, not a comparison"
            raise ValueError(
                f"torchkiln.jit: expression: argument {i + 1} of {node.function} in {text!r}:"
                f" expected {wanted}"
            )
        _require_kinds(argument, text)


def _read(tree: ast.expr, text: str) -> Node:  # noqa: PLR0911  one for each kind
    def read(*parts: ast.expr) -> tuple[Node, ...]:
        return tuple(_read(part, text) for part in parts)

    match tree:
        case ast.Name(id=name):
            return Name(name)
        case ast.Constant(value=float() | int() as value) if not isinstance(value, bool):
            return Number(float(value))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float() | int() as value)):
            return Number(-float(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return Call("neg", read(operand))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _read(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return Call(BINARY[type(op)], read(left, right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
            return Call(COMPARED[type(op)], read(left, right))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _called("where", read(test, body, orelse), text)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _called(name, read(*arguments), text)
    part = ast.get_source_segment(text.strip(), tree)
    raise ValueError(
        f"torchkiln.jit: expression: got {part!r} in {text!r}, expected names, numbers,"
        " + - * / **, one comparison, a if b else c, or a function by its name alone:"
        f" {', '.join(sorted(FUNCTIONS.keys() - OPERATORS))}"
    )


def _called(name: str, arguments: tuple[Node, ...], text: str) -> Node:
    known = sorted(FUNCTIONS.keys() - OPERATORS)
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"torchkiln.jit: expression: got function {name!r} in {text!r}, expected one of"
            f" {', '.join(known)}{hint}"
        )
    function = FUNCTIONS[name]
    if len(arguments) != function.arity:
        got = f"{len(arguments)} arguments of {name}"
        raise ValueError(
            f"torchkiln.jit: expression: got {got} in {text!r}, expected {function.arity}"
        )
    return Call(name, arguments)


def names_in(node: Node) -> Iterator[str]:
    """Names from left to right, each as often as it occurs."""
    if isinstance(node, Name):
        yield node.name
    elif isinstance(node, Call):
        for argument in node.arguments:
            yield from names_in(argument)


ZERO, ONE = Number(0.0), Number(1.0)


def call(function: str, *arguments: Node) -> Node:
    """A call, without those that change nothing."""
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
    return tuple(_read(ast.parse(text, mode="eval").body, text) for text in texts)


def replaced(node: Node, by: Mapping[str, Node]) -> Node:
    """The formula with other parts for its names."""
    if isinstance(node, Name):
        return by.get(node.name, node)
    if isinstance(node, Call):
        return call(node.function, *(replaced(argument, by) for argument in node.arguments))
    return node


def slope(node: Node, name: str) -> Node:
    """The derivative for a name."""
    if isinstance(node, Name):
        return ONE if node.name == name else ZERO
    if not isinstance(node, Call):
        return ZERO
    by = dict(zip("abc", node.arguments, strict=False))
    total: Node = ZERO
    for argument, outer in zip(node.arguments, _slopes(node.function), strict=True):
        inner = slope(argument, name)
        if inner != ZERO:
            total = call("add", total, call("mul", replaced(outer, by), inner))
    return total


def magnitude(node: Node) -> Node:
    """The sum of the absolute values of all that is added up: what rounding is proportional to."""
    if not isinstance(node, Call):
        return Call("abs", (node,))
    if FUNCTIONS[node.function].condition:
        return node
    if node.function in ("add", "sub"):
        return call("add", *map(magnitude, node.arguments))
    by = dict(zip("abc", node.arguments, strict=False))
    total: Node = Call("abs", (node,))
    for argument, outer in zip(node.arguments, _slopes(node.function), strict=True):
        if next(names_in(argument), None) is not None and outer != ZERO:
            steep = Call("abs", (replaced(outer, by),))
            total = call("add", total, call("mul", steep, magnitude(argument)))
    return total


def cuda_of(nodes: Mapping[str, Node]) -> str:
    """C++ that assigns each result. Names end in an underscore there; equal parts are one."""
    lines: list[str] = []
    known: dict[Node, str] = {}

    def write(node: Node) -> str:
        if isinstance(node, Name):
            return f"{node.name}_"
        if isinstance(node, Number):
            return f"C({node.value!r})" if abs(node.value) < float("inf") else "C(INFINITY)"
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
    """The formula by torch's functions, in the dtype of tensors of ``values``."""
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
