"""The forward of a class without its decorators, and blocks of its statements."""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from types import CellType, FunctionType
from typing import Any

from torch import nn

from torchkiln.patch.source.text import SCOPES, codes, compiled, definition

GUARDS = (ast.Try, ast.TryStar, ast.With, ast.AsyncWith)
"""Statements that may catch an exception: code after them sees the variables at that point."""


def forward_of(cls: type) -> FunctionType | str:
    """The forward of a class without its decorators, or the reason why they cannot be removed."""
    function: Any = cls.forward  # type: ignore[attr-defined]
    while hasattr(function, "__wrapped__"):
        if not is_closure_over(function, function.__wrapped__):
            return "its forward is decorated"
        function = function.__wrapped__
    if not isinstance(function, FunctionType):
        return "its forward is decorated"
    if function.__closure__:
        return "its forward uses variables of an enclosing function, or super()"
    return function


def remade(
    owner: type[nn.Module],
    rewrite: Callable[[ast.FunctionDef, FunctionType], object],
    **helpers: Callable[..., Any],
) -> Callable[..., Any]:
    """The forward of a class after ``rewrite`` has changed its definition, with its decorators.

    Without its source, for example in a pickle from another version of the class, the forward is
    returned unchanged, with a warning.
    """
    function = forward_of(owner)
    node = function if isinstance(function, str) else definition(function)
    forward: Callable[..., Any] = owner.forward
    if isinstance(function, str) or isinstance(node, str):
        warnings.warn(
            f"torchkiln.replace: {owner.__qualname__}: {node}, so the forward of the class runs; "
            "call torchkiln.replace again where its source is",
            stacklevel=2,
        )
        return forward
    rewrite(node, function)
    made: Callable[..., Any] = decorated(forward, function, compiled(function, node, **helpers))
    return made


def is_closure_over(wrapper: Any, wrapped: object) -> bool:
    """Whether exactly one closure variable of a function holds the function that it wraps."""
    if not isinstance(wrapper, FunctionType) or any("dynamo" in name for name in vars(wrapper)):
        return False
    held = [contents(cell) for cell in wrapper.__closure__ or ()]
    others = [value for value in held if value is not wrapped and value is not wrapper]
    count = sum(value is wrapped for value in held)
    return count == 1 and not any(refers(other, wrapped) for other in others)


def contents(cell: CellType) -> object:
    """The value in a cell; None if it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def refers(value: object, wrapped: object) -> bool:
    """Whether a function or a container holds the wrapped function."""
    if isinstance(value, FunctionType):
        return any(contents(cell) is wrapped for cell in value.__closure__ or ())
    if isinstance(value, dict):
        value = (*value.keys(), *value.values())
    return isinstance(value, (tuple, list, set)) and any(one is wrapped for one in value)


def decorated(wrapper: Any, inner: Any, function: Callable[..., Any]) -> Any:
    """``function`` with the decorators that are around ``inner``.

    A wrapper may hold itself in a closure variable, as gradient checkpoints of Hugging Face do to
    compare themselves with the forward of the class. The copy then holds the copy.
    """
    if wrapper is inner:
        return function
    below = decorated(wrapper.__wrapped__, inner, function)
    itself = CellType()
    new = {id(wrapper): itself, id(wrapper.__wrapped__): CellType(below)}
    cells = tuple(new.get(id(contents(cell)), cell) for cell in wrapper.__closure__)
    made = FunctionType(
        wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells
    )
    made.__kwdefaults__ = wrapper.__kwdefaults__
    functools.update_wrapper(made, wrapper)
    made.__wrapped__ = below  # type: ignore[attr-defined]
    itself.cell_contents = made
    return made


def with_class_wrapper(cls: type, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the wrapper that ``__init_subclass__`` puts around each forward, if any."""
    wrapper: Any = cls.forward  # type: ignore[attr-defined]
    wrapped = getattr(wrapper, "__wrapped__", None)
    if wrapped is None or not is_closure_over(wrapper, wrapped):
        return function
    makers = [getattr(vars(base).get("__init_subclass__"), "__func__", None) for base in cls.mro()]
    inner = [codes(maker.__code__) for maker in makers if isinstance(maker, FunctionType)]
    is_made = any(wrapper.__code__ is code for code in chain.from_iterable(inner))
    return decorated(wrapper, wrapped, function) if is_made else function


def blocks(node: ast.AST, but: tuple[type[ast.stmt], ...] = ()) -> Iterator[list[ast.stmt]]:
    """The lists of statements of a function, outside of definitions and of the classes ``but``."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*SCOPES, *but)):
            yield from blocks(child, but)


def properties(cls: type[nn.Module]) -> set[str]:
    """The attributes of a class that run code when they are read."""
    values: dict[str, Any] = {}
    for base in reversed(cls.mro()):
        values |= {} if base in (nn.Module, object) else vars(base)
    return {n for n, value in values.items() if hasattr(value, "__get__") and not callable(value)}
