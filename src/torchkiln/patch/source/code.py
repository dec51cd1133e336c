"""Another forward from the source of a class's forward, with some statements rewritten."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

MAKER = "_kiln_make"


def forward_of(cls: type) -> FunctionType | str:
    """The forward of a class below its decorators, or why its source cannot be used."""
    function = below_class_wrappers(cls)
    while hasattr(function, "__wrapped__"):
        if not is_closure_over(function, function.__wrapped__):
            return "its forward is decorated"
        function = function.__wrapped__
    if not isinstance(function, FunctionType):
        return "its forward is decorated"
    if function.__closure__:
        return "its forward uses variables of an enclosing function, or super()"
    return function


def below_class_wrappers(cls: type) -> Any:
    """The forward of a class without a wrapper that each of its subclasses gets anyway."""
    function: Any = cls.forward  # type: ignore[attr-defined]
    if hasattr(function, "__wrapped__") and wraps_subclasses(cls):
        code = function.__code__
        while getattr(function, "__code__", None) is code:
            function = function.__wrapped__
    return function


def is_closure_over(wrapper: Any, wrapped: object) -> bool:
    """Whether a wrapper is a function with the wrapped one in a single variable."""
    if not isinstance(wrapper, FunctionType) or any("dynamo" in name for name in vars(wrapper)):
        return False
    cells = wrapper.__closure__ or ()
    others = [contents(cell) for cell in cells if contents(cell) is not wrapped]
    return len(others) == len(cells) - 1 and not any(refers(other, wrapped) for other in others)


def contents(cell: CellType) -> object:
    """The value in a cell; None if it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def refers(value: object, wrapped: object) -> bool:
    """Whether a function or a container has the wrapped function in it."""
    if isinstance(value, FunctionType):
        return any(contents(cell) is wrapped for cell in value.__closure__ or ())
    if isinstance(value, dict):
        value = (*value.keys(), *value.values())
    return isinstance(value, (tuple, list, set)) and any(one is wrapped for one in value)


def decorated(wrapper: Any, inner: FunctionType, function: Callable[..., Any]) -> Any:
    """``function`` with the decorators that are around ``inner``."""
    if wrapper is inner:
        return function
    below = decorated(wrapper.__wrapped__, inner, function)
    cells = tuple(
        CellType(below) if contents(cell) is wrapper.__wrapped__ else cell
        for cell in wrapper.__closure__
    )
    made = FunctionType(
        wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells
    )
    made.__kwdefaults__ = wrapper.__kwdefaults__
    functools.update_wrapper(made, wrapper)
    made.__wrapped__ = below  # type: ignore[attr-defined]
    return made


def wraps_subclasses(cls: type) -> bool:
    """Whether each subclass gets the wrapper that is around the forward of the class.

    Hugging Face's layers with gradient checkpoints do: a subclass with the inner forward has the
    same wrapper.
    """

    def forward() -> None:
        """Stands for the forward of a subclass."""

    try:
        made: Any = type("KilnStandIn", (cls,), {"forward": forward, "__module__": cls.__module__})
    except Exception:  # a class that takes no subclasses without arguments
        return False
    wrapper, code = made.forward, cls.forward.__code__  # type: ignore[attr-defined]
    is_wrapped = getattr(wrapper, "__wrapped__", None) is forward
    return is_wrapped and getattr(wrapper, "__code__", None) is code


def parsed(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The definition of a function, with the lines of its file."""
    try:
        lines, first = inspect.getsourcelines(function)
        (node,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    is_function = isinstance(node, ast.FunctionDef) and node.name == function.__name__
    return ast.increment_lineno(node, first - 1) if is_function else None  # type: ignore[return-value]


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """All lists of statements."""
    for part in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(part, name, None)
            if isinstance(block, list):
                yield block


def definition(function: FunctionType) -> ast.FunctionDef | str:
    """The definition of a function without decorators, or why it cannot be used."""
    node = parsed(function)
    if node is None:
        return "the source of its forward is not available"
    node.decorator_list = []
    names = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    if any(name.startswith("__") and not name.endswith("__") for name in names):
        return "its forward uses names that are private to its class"
    return node


def compiled(
    function: FunctionType, node: ast.FunctionDef, **helpers: Callable[..., Any]
) -> Callable[..., Any]:
    """The function of a rewritten definition, which may call helpers by their names.

    It has the globals and the default values of the original; nothing is added to them.
    """
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    node.returns = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [d and ast.Constant(None) for d in arguments.kw_defaults]
    module = ast.parse(f"def {MAKER}({', '.join(helpers)}):\n    return {node.name}")
    maker = module.body[0]
    assert isinstance(maker, ast.FunctionDef)
    maker.body.insert(0, node)
    ast.fix_missing_locations(module)
    scope: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, scope)
    made: FunctionType = scope[MAKER](*helpers.values())
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made
