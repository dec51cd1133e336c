"""The functions that a traced forward ran, as conditions: another one may depend on strides."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from torchkiln.nn.plain import MISSING
from torchkiln.patch.formula.reads import GLOBALS, Path
from torchkiln.patch.formula.reads import found as value_at
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.formula.watch import is_users
from torchkiln.patch.source.text import nested

Ran = tuple[tuple[Path, str], ...]
"""Where functions are, with the digests of their code: the path of a module in the model and the
name of a method; :data:`GLOBALS`, a module of Python and the name of a function; or
:data:`VALUES` and the path of an attribute or a global that is compared by identity."""

VALUES = "<values>"

ALWAYS = ("forward", "__call__")
"""Methods that each call of a module runs."""


class Definition(NamedTuple):
    """A function that an attribute of a class or a module of Python holds."""

    owner: Any
    name: str
    value: Any


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The function of a method or a property, and the functions that it wraps."""
    seen: list[Any] = []
    while not any(value is one for one in (None, *seen)):
        seen.append(value)
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, partial):
            value = value.func
        value = getattr(value, "__func__", value)
        if isinstance(value, FunctionType):
            yield value
        value = getattr(value, "__wrapped__", None)


def methods(cls: type, name: str) -> list[Definition]:
    """The functions of this name in a class, which may inherit it, and in its bases."""
    owners = [one for one in cls.__mro__ if one is cls or name in vars(one)]
    found = [Definition(one, name, getattr(one, name, MISSING)) for one in owners]
    return [one for one in found if any(functions_in(one.value))]


def definitions_at(module: nn.Module, classes: Mapping[str, type], path: Path) -> list[Definition]:
    """The functions at a path of :data:`Ran` in a model with these classes."""
    owner, *names = path
    if owner == VALUES:
        return [Definition(None, "", value_at(module, tuple(names)))]
    return function_of(*names) if owner == GLOBALS else methods(classes[owner], *names)


def function_of(module: str, name: str) -> list[Definition]:
    """The function at a qualified name in a module of Python."""
    owner: Any = sys.modules.get(module)
    *path, last = name.split(".")
    for one in path:
        owner = getattr(owner, one, None)
    value = getattr(owner, last, MISSING)
    return [Definition(owner, last, value)] if any(functions_in(value)) else []


def called_methods(cls: type[nn.Module]) -> set[str]:
    """The methods that the forward of a class calls by name."""
    codes = [function.__code__ for function in functions_in(cls.forward)]
    names = {name for code in codes for name in code.co_names}
    return {name for name in names if isinstance(getattr(cls, name, None), FunctionType)}


def digest(found: Iterable[Definition]) -> str:
    """A text of the code of functions of users, the same in each process."""
    functions = [function for one in found for function in functions_in(one.value)]
    texts = [
        contents(one.__code__) if is_users(one.__code__.co_filename) else one.__qualname__
        for one in functions
    ]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def contents(code: CodeType) -> tuple[Any, ...]:
    """The instructions, names and constants of a function."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_code, names, code.co_flags, [constant(value) for value in code.co_consts]


def constant(value: Any) -> Any:
    """A constant as a value whose text is the same in each process."""
    if isinstance(value, CodeType):
        return contents(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def is_generated(code: CodeType, scope: Mapping[str, Any]) -> bool:
    """Whether a function is of a named tuple or a dataclass, such as those of torch's tracer."""
    is_tuples = str(scope.get("__name__", "")).startswith("namedtuple_")
    is_datas = code.co_qualname.startswith("__create_fn__.")
    return code.co_filename == "<string>" and (is_tuples or is_datas)


def ran(
    classes: Mapping[str, type[nn.Module]],
    codes: Mapping[CodeType, Mapping[str, Any]],
    values: Mapping[Path, Any],
) -> Ran:
    """The functions that ran; raises NoFormulaError if no name leads to one.

    Args:
        classes: the classes of modules, by the path of the module.
        codes: the functions of users that ran, with their globals.
        values: the values of attributes and globals that were read.
    """
    found: dict[Path, list[Definition]] = {}
    paths = {cls: path for path, cls in reversed([*classes.items()])}
    names = dict.fromkeys(name for code in codes for name in code.co_names)
    for cls, path in paths.items():
        for name in dict.fromkeys((*ALWAYS, *names)):
            if name in ALWAYS or not hasattr(nn.Module, name):
                found[path, name] = methods(cls, name)
    for steps, value in values.items():
        if any(functions_in(value)):
            found[VALUES, *steps] = [Definition(None, "", value)]
    held = {f.__code__ for ds in found.values() for one in ds for f in functions_in(one.value)}
    held |= {code for code, scope in codes.items() if is_generated(code, scope)}
    for code, scope in codes.items():
        if code in held:
            continue
        name, module = code.co_qualname, str(scope.get("__name__", ""))
        place = function_of(module, name)
        if any(f.__code__ is code for one in place for f in functions_in(one.value)):
            found[GLOBALS, module, name] = place
            held.add(code)
    held |= {inner for code in held for inner in nested(code)}
    for code in codes:
        if code not in held:
            raise NoFormulaError(f"no name leads to {code.co_qualname}, which it calls")
    return tuple((path, digest(place)) for path, place in found.items() if place)
