"""The definition of a function from its source, if that source compiles to the code that runs."""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

MAKER = "_kiln_make"

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
"""Definitions that have local variables."""

FUTURES = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag,
    __future__.all_feature_names,
    0,
)
"""The flags of code below ``from __future__ import ...``."""

WITHOUT_EFFECT = inspect.CO_NESTED | 0x8000000
"""Flags that say where code was defined: in a function, or in a class (``CO_METHOD``)."""

COMPARED = (
    *("co_name", "co_code", "co_names", "co_varnames", "co_cellvars", "co_freevars"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_exceptiontable"),
)

FRAME_READERS = {"locals", "eval", "exec", "_getframe", "currentframe"}
"""Names of functions that read the variables of their caller."""

PROVEN: weakref.WeakKeyDictionary[CodeType, dict[Any, ast.FunctionDef]] = (
    weakref.WeakKeyDictionary()
)
"""Definitions that compile to the code, by file and name: other places may have equal code."""


def parsed(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The definition of a function, read from its file; the file may have changed since."""
    try:
        lines, first = inspect.getsourcelines(function)
        # A class around the lines keeps their indentation, which strings of several lines contain.
        is_indented = lines[0][:1].isspace()
        tree = ast.parse("".join(["class _:\n" * is_indented, *lines]))
        (node,) = tree.body[0].body if is_indented else tree.body  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return None
    if not isinstance(node, ast.FunctionDef) or node.name != function.__name__:
        return None
    ast.increment_lineno(node, first - 1 - is_indented)
    return node


def definition(function: FunctionType) -> ast.FunctionDef | str:
    """The definition of a function without decorators, or the reason why it cannot be used."""
    code = function.__code__
    place = code.co_filename, code.co_qualname
    if place not in PROVEN.get(code, {}):
        node = parsed(function)
        if node is None:
            return "the source of its forward is not available"
        without_surroundings(node)
        if not is_same(code_of(copy.deepcopy(node), code, imports=imports(function)), code):
            return "the source of its forward is not the code that runs"
        PROVEN.setdefault(code, {})[place] = node
    node = PROVEN[code][place]
    return why_not(node) or copy.deepcopy(node)


def without_surroundings(node: ast.FunctionDef) -> None:
    """Remove the parts that run at definition: decorators, annotations and defaults."""
    node.decorator_list, node.returns = [], None
    if hasattr(node, "type_params"):  # Python 3.12
        node.type_params = []
    arguments = node.args
    for argument in (
        *(*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs),
        *(argument for argument in (arguments.vararg, arguments.kwarg) if argument),
    ):
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [d and ast.Constant(None) for d in arguments.kw_defaults]
    ast.fix_missing_locations(node)


def why_not(node: ast.FunctionDef) -> str:
    """The reason why statements of a function cannot be rewritten; empty if they can."""
    for part in ast.walk(node):
        if isinstance(part, (ast.Yield, ast.YieldFrom)):
            return "its forward is a generator"
        if isinstance(part, (ast.Global, ast.Nonlocal)):
            return "its forward sets variables of others"
        if isinstance(part, ast.Name) and part.id == "self" and not isinstance(part.ctx, ast.Load):
            return "its forward sets self"
        names = [getattr(part, field, None) for field in ("attr", "id", "arg")]
        is_bare = isinstance(part, ast.Call) and not part.args
        own = getattr(getattr(part, "func", None), "id", "") if is_bare else ""
        if FRAME_READERS & set(names) or own in {"vars", "dir"}:
            return "its forward reads its own variables by name"
        if any(isinstance(name, str) and name.startswith("_kiln") for name in names):
            return "its forward has names of torchkiln"
    return ""


IMPORTS: dict[str, tuple[list[str], frozenset[str]]] = {}
"""The lines of each file, as :mod:`linecache` holds them, and the names that it imports."""


def imports(function: FunctionType) -> frozenset[str]:
    """The names that a function's file imports: calls of their methods compile differently."""
    lines, _ = inspect.findsource(function)
    known, names = IMPORTS.get(function.__code__.co_filename, (None, frozenset()))
    if known is not lines:
        try:
            names = frozenset(imported(ast.parse("".join(lines))))
        except SyntaxError:  # not Python: for example a page whose blocks are run
            names = frozenset()
        IMPORTS[function.__code__.co_filename] = lines, names
    return names


def imported(node: ast.AST) -> Iterator[str]:
    """The names that statements import, outside of definitions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in child.names)
        elif isinstance(child, (ast.stmt, ast.ExceptHandler)) and not isinstance(child, SCOPES):
            yield from imported(child)


def code_of(
    node: ast.FunctionDef,
    like: CodeType,
    names: tuple[str, ...] = (),
    imports: Collection[str] = (),
) -> CodeType:
    """The code of a definition, compiled in the surroundings of ``like``.

    The surroundings are the flags, the imported names and the class, whose name Python puts into
    private names such as ``__x``. ``names`` are variables of an enclosing function.
    """
    # Leading underscores do not change private names, and no global has so many.
    owner = "_" * 40 + class_of(like.co_qualname).lstrip("_")
    module = ast.parse(f"def {MAKER}({', '.join(names)}):\n    class {owner}: pass")
    maker: Any = module.body[0]
    maker.body[0].body = [node]
    used = [ast.alias(name) for name in like.co_names if name in imports]
    module.body[:0] = [ast.Import(used)] if used else []
    ast.fix_missing_locations(module)
    flags = like.co_flags & FUTURES
    code = compile(module, like.co_filename, "exec", flags, dont_inherit=True)
    for name in (MAKER, owner, node.name):
        code = next(part for part in codes(code) if part.co_name == name)
    return code


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of functions and classes that are defined directly in code."""
    return (part for part in code.co_consts if isinstance(part, CodeType))


def nested(code: CodeType) -> Iterator[CodeType]:
    """Code, and all code in it."""
    yield code
    for part in codes(code):
        yield from nested(part)


def class_of(qualname: str) -> str:
    """The name of the innermost class around a function; empty without one."""
    local = "<locals>"
    *parts, _ = qualname.split(".")
    following = [*parts[1:], ""] if parts else []
    pairs = zip(parts, following, strict=True)
    return next((a for a, b in reversed(list(pairs)) if local not in (a, b)), "")


def is_same(a: CodeType, b: CodeType) -> bool:
    """Whether code is equal, apart from file names, qualified names and line numbers."""
    flags = (a.co_flags ^ b.co_flags) & ~WITHOUT_EFFECT
    alike = all(getattr(a, name) == getattr(b, name) for name in COMPARED)
    return alike and not flags and is_same_constant(a.co_consts, b.co_consts)


def is_same_constant(a: object, b: object) -> bool:
    """Whether constants are equal, with their types: 0 is not False, nor 0.0, nor -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, CodeType) and isinstance(b, CodeType):
        return is_same(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(is_same_constant, a, b))
    if isinstance(a, frozenset) and isinstance(b, frozenset):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    return repr(a) == repr(b)


def compiled(
    function: FunctionType, node: ast.FunctionDef, **helpers: Callable[..., Any]
) -> FunctionType:
    """The function of a rewritten definition, which may call helpers by their names.

    It has the globals and the default values of the original function, unchanged.
    """
    code = code_of(node, function.__code__, tuple(helpers))
    code = code.replace(co_qualname=function.__code__.co_qualname)
    cells = tuple(CellType(helpers[name]) for name in code.co_freevars)
    name, defaults = function.__name__, function.__defaults__
    made = FunctionType(code, function.__globals__, name, defaults, cells)
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]
    added = {arg.arg: False for arg in node.args.kwonlyargs if arg.arg.startswith("_kiln")}
    made.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **added} or None
    return made
