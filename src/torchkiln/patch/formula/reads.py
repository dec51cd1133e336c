"""The attributes that a forward reads, as conditions for its plan."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.nn.plain import MISSING, attribute, has_hooks
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.plan import unseen_subclass

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
CODE = (FunctionType, BuiltinFunctionType, type, partial)
MACHINERY = frozenset(vars(nn.Module()))
"""Attributes that ``nn.Module`` sets in every module."""

GLOBALS = "<globals>"
"""The first part of the path of a global; the module and the name of the global follow."""

Path = tuple[str, ...]


class AnyNumber:
    """A condition that holds for every float from 0 to :data:`LARGEST`."""


LARGEST = 0.5
"""The largest eps for which a formula is tried."""


@dataclass(frozen=True)
class Reads:
    """The conditions of a plan: values of attributes, and classes of submodules."""

    values: tuple[tuple[Path, Any], ...] = ()
    parts: tuple[tuple[str, type[nn.Module]], ...] = ()
    """Submodules whose forward is part of the formula."""

    def hold(self, module: Any) -> bool:
        """Whether a module still has these values and classes, and its parts have no hooks.

        Dynamo traces this function and guards on all that it reads, so that a compiled call is
        checked as often as an eager one. A graph break here would split the model's graph.
        """
        for name, cls in self.parts:
            part = part_at(module, name)
            if type(part) is not cls or "forward" in part.__dict__ or has_hooks(part):
                return False
        for path, value in self.values:
            one = attribute(module, path[0], MISSING) if len(path) == 1 else found(module, path)
            if value is AnyNumber:
                if type(one) is not float or not 0 <= one <= LARGEST:
                    return False
            elif one is not value and not same(frozen(one), value):
                return False
        return True

    def settings(self) -> dict[str, Any]:
        """The conditions in types of Python, for pickles."""
        values = tuple((p, None if value is AnyNumber else value) for p, value in self.values)
        numbers = tuple(path for path, value in self.values if value is AnyNumber)
        return {"values": values, "numbers": numbers, "parts": self.parts}

    @classmethod
    def loaded(cls, settings: dict[str, Any]) -> Reads:
        """The conditions with these settings from a pickle."""
        numbers = settings["numbers"]
        values = ((p, AnyNumber if p in numbers else value) for p, value in settings["values"])
        return cls(tuple(values), settings["parts"])

    def __add__(self, other: Reads) -> Reads:
        """The conditions of both operands."""
        return Reads((*self.values, *other.values), (*self.parts, *other.parts))

    def below(self, name: str) -> Reads:
        """The conditions of a submodule as conditions of the module that has it as ``name``."""
        values = tuple(
            (path if path[0] == GLOBALS else (*name.split("."), *path), value)
            for path, value in self.values
        )
        return Reads(values, tuple((f"{name}.{part}", cls) for part, cls in self.parts))

    def with_any(self, name: str) -> Reads:
        """The conditions, except that one attribute may be any float of :class:`AnyNumber`."""
        values = tuple((p, AnyNumber if p == (name,) else value) for p, value in self.values)
        return Reads(values, self.parts)


def part_at(module: Any, name: str) -> Any:
    """The submodule at a path, read from the dicts of the modules as far as they have it."""
    part = module._modules.get(name)
    if part is not None:
        return part
    names = name.split(".")
    part = module
    for one in names:
        part = part._modules.get(one)
        if part is None:
            return found(module, tuple(names))
    return part


def found(owner: Any, path: Path) -> Any:
    """The value at a path of attributes; MISSING if there is none."""
    if path[0] == GLOBALS:
        return getattr(sys.modules.get(path[1]), path[2], MISSING)
    for name in path:
        look_up = attribute if isinstance(owner, nn.Module) else getattr
        owner = look_up(owner, name, MISSING)
    return owner


def frozen(value: Any) -> Any:
    """A list or a dict as a tuple, which later changes of the container do not affect."""
    if isinstance(value, list):
        return tuple(value)
    return tuple(value.items()) if isinstance(value, dict) else value


def same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or plain and equal."""
    if isinstance(one, partial) and isinstance(other, partial):
        if one.func is not other.func:
            return False
        one, other = arguments_of(one), arguments_of(other)
    return one is other or (type(one) is type(other) and is_plain(one) and one == other)


def arguments_of(value: partial[Any]) -> tuple[Any, ...]:
    """The arguments of a partial, which can be compared."""
    return (value.args, tuple(value.keywords.items()))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return type(value) in PLAIN or isinstance(value, enum.Enum)


def is_importable(value: Any) -> bool:
    """Whether a value is a function or a class that pickle can store by name."""
    if not isinstance(value, (FunctionType, type)):
        return False
    return getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value


@dataclass
class Reader:
    """Collects the attributes that a copied module and its submodules read.

    ``takes_tensors`` is whether the module may read tensors that are no parameters.
    """

    takes_tensors: bool = False
    values: dict[Path, Any] = field(default_factory=dict)
    parts: dict[str, type[nn.Module]] = field(default_factory=dict)
    reason: str = ""
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    """Copies of containers that the forward received, and their contents before."""

    def reads(self) -> Reads:
        """The conditions; raises if a value was read that a condition cannot compare later."""
        if any(frozen(copy) != before for copy, before in self.copies):
            self.refuse("it changes a list or a dict")
        if self.reason:
            raise NoFormulaError(self.reason)
        return Reads(tuple(self.values.items()), tuple(self.parts.items()))

    def note(self, path: Path, value: Any) -> Any:
        """Record a value that was read; returns the value, a copy, or :class:`Held` for objects."""
        if isinstance(value, nn.Module) and not self.takes_tensors and not is_read(value):
            self.refuse(f"it calls {'.'.join(path)}, which is no submodule")
        if isinstance(value, (nn.Module, nn.Parameter, MethodType)):
            return value
        if type(value) in (list, dict) and is_plain(frozen(value)):
            self.values[path] = frozen(value)
            self.copies.append((value.copy(), frozen(value)))
            return self.copies[-1][0]
        if isinstance(value, CODE) or is_plain(value):
            self.values[path] = value
        elif isinstance(value, Tensor):
            if self.takes_tensors:
                return value
            self.refuse(f"it reads the tensor {'.'.join(path)}, which is no parameter")
        elif hasattr(value, "__dict__") and not callable(value) and type(value) is not dict:
            return Held(self, path, value)
        else:
            self.refuse(f"it reads {'.'.join(path)}, a {type(value).__name__}")
        return value

    def note_globals(self, values: dict[tuple[str, str], Any]) -> None:
        """Record globals that functions could read, if they are plain values or importable."""
        for path, value in values.items():
            if is_plain(frozen(value)) or is_importable(value):
                self.values[GLOBALS, *path] = frozen(value)

    def refuse(self, reason: str) -> None:
        """Store a reason to refuse the module; only the first one is kept."""
        self.reason = self.reason or reason


class Held:
    """Stands for an object whose plain attributes may be read."""

    def __init__(self, reader: Reader, path: Path, value: Any) -> None:
        self.__dict__.update(_kiln_reader=reader, _kiln_path=path, _kiln_value=value)

    def __getattr__(self, name: str) -> Any:
        try:
            value = getattr(self._kiln_value, name)
        except AttributeError:
            self._kiln_reader.values[*self._kiln_path, name] = MISSING
            raise
        if isinstance(value, MethodType):
            self._kiln_reader.refuse(f"it calls {'.'.join((*self._kiln_path, name))}")
        return self._kiln_reader.note((*self._kiln_path, name), value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise NoFormulaError(f"it sets {'.'.join((*self._kiln_path, name))}")


OF_CLASS = frozenset(dir(nn.Module))
READ = "_kiln_read"
"""An attribute of classes whose instances report the attributes that are read."""


def is_read(module: nn.Module) -> bool:
    """Whether a module reports the attributes that are read."""
    return hasattr(type(module), READ)


def reading(original: type[nn.Module], reader: Reader, prefix: Path = ()) -> type[nn.Module]:
    """A subclass of ``original`` whose instances report the attributes that are read."""

    def note(name: str, value: Any) -> Any:
        if name in MACHINERY or name.startswith("__"):
            return value
        if name in OF_CLASS and getattr(nn.Module, name) is value:
            return value
        return reader.note((*prefix, name), value)

    def get(self: nn.Module, name: str) -> Any:
        return note(name, original.__getattribute__(self, name))

    def get_other(self: nn.Module, name: str) -> Any:
        try:
            value = original.__getattr__(self, name)
        except AttributeError:
            reader.values[*prefix, name] = MISSING
            raise
        return note(name, value)

    def refuse(self: nn.Module, name: str, value: Any) -> None:
        if name.startswith("_tensor_constant"):  # set by the tracer of torch.fx
            original.__setattr__(self, name, value)
            return
        raise NoFormulaError(f"it sets {'.'.join((*prefix, name))}")

    scope = {READ: True, "__getattribute__": get, "__getattr__": get_other, "__setattr__": refuse}
    try:
        return unseen_subclass(original, original.__name__, scope)
    except TypeError as error:
        raise NoFormulaError(f"its class has no subclass: {error}") from error
