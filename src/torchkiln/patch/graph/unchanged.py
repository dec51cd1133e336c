"""Fast checks that a model is still the one that was traced: a few nanoseconds per condition."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, eq, is_
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from torchkiln.nn.plain import MISSING
from torchkiln.patch.formula.reads import GLOBALS, Path, Reads, found, frozen, same
from torchkiln.patch.graph.definitions import (
    Definition,
    Ran,
    called_methods,
    definitions_at,
    digest,
    functions_in,
)
from torchkiln.patch.graph.flat import class_of, is_leaf, is_of_leaves

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")

Children = tuple[tuple[str, tuple[str, ...]], ...]
"""The names of the children of each module that is no leaf, by the path of the module."""


CODE_OF, ABSENT = attrgetter("__code__"), repeat(MISSING)

KEPT = "_kiln_conditions"
"""The attribute of a model that holds its conditions, and is None in copies and pickles."""


@dataclass
class Conditions:
    """Objects that are compared by identity, in lists that the interpreter walks without a loop.

    Parts of the model and their classes, the absence of hooks, and entries of dicts: children,
    attributes, forwards of instances. ``others`` are attributes of classes, globals and containers.
    Classes and modules of Python in ``owners`` have the functions that ran, with their code.
    """

    owner: weakref.ref[nn.Module]
    parts: list[nn.Module] = field(default_factory=list)
    classes: list[type] = field(default_factory=list)
    hooks: list[dict[Any, Any]] = field(default_factory=list)
    dicts: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    modes: list[dict[str, Any]] = field(default_factory=list)
    others: list[tuple[Path, Any]] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)
    attributes: list[str] = field(default_factory=list)
    definitions: list[Any] = field(default_factory=list)
    functions: list[FunctionType] = field(default_factory=list)
    codes: list[CodeType] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have other objects, so they hold None instead."""
        return type(None), ()

    def add(self, place: dict[str, Any], name: str, value: Any) -> None:
        """Require an entry of a dict."""
        self.dicts.append(place)
        self.names.append(name)
        self.values.append(value)

    def define(self, found: Iterable[Definition]) -> None:
        """Require functions in classes and in modules of Python, and their code."""
        for owner, name, value in found:
            if owner is not None:
                self.owners.append(owner)
                self.attributes.append(name)
                self.definitions.append(value)
            for function in functions_in(value):
                self.functions.append(function)
                self.codes.append(function.__code__)

    def hold(self, module: nn.Module) -> bool:
        """Whether the model is unchanged."""
        return (
            not any(self.hooks)
            and all(map(is_, map(type, self.parts), self.classes))
            and all(map(is_, map(dict.get, self.dicts, self.names, ABSENT), self.values))
            and [*map(len, self.tables)] == self.sizes
            and all(map(eq, map(getattr, self.owners, self.attributes, ABSENT), self.definitions))
            and all(map(is_, map(CODE_OF, self.functions), self.codes))
            and all(mode["training"] is module.training for mode in self.modes)
            and all(same(frozen(found(module, path)), value) for path, value in self.others)
        )


def conditions_of(
    module: nn.Module, reads: Reads, children: Children, ran: Ran
) -> Conditions | None:
    """The conditions with the objects of a model; None if it is not the one that was traced."""
    new = Conditions(weakref.ref(module))
    classes = dict(reads.parts)
    for path, part in parts_of(module, reads):
        is_root = part is module
        if not isinstance(part, nn.Module) or not (is_root or class_of(part) is classes[path]):
            return None
        if not is_root:
            new.parts.append(part)
            new.classes.append(type(part))
        new.hooks += [vars(part)[name] for name in HOOKS]
        for name in FORWARD_HOOKS:  # code that removes hooks often sets another dict
            new.add(vars(part), name, vars(part)[name])
        if not is_leaf(part):
            new.modes.append(vars(part))
        new.add(vars(part), "forward", MISSING)
    if not (require_children(new, module, children) and require_functions(new, module, reads, ran)):
        return None
    for steps, value in reads.values:
        place = place_of(module, steps)
        if place is None or isinstance(value, tuple):
            new.others.append((steps, value))
        elif same(place[steps[-1]], value):
            new.add(place, steps[-1], place[steps[-1]])
        else:
            return None
    return new if new.hold(module) else None


def require_children(new: Conditions, module: nn.Module, children: Children) -> bool:
    """Add the children of modules; False if a module has others."""
    for path, names in children:
        table = found(module, tuple(path.split(".")))._modules if path else module._modules
        if tuple(table) != names:
            return False
        new.tables.append(table)
        new.sizes.append(len(names))
        for name in names:
            new.add(table, name, table[name])
    return True


def require_functions(new: Conditions, module: nn.Module, reads: Reads, ran: Ran) -> bool:
    """Add the functions that ran; False if one has other code."""
    classes = {"": class_of(module), **dict(reads.parts)}
    called = {cls: called_methods(cls) for cls in classes.values() if is_of_leaves(cls)}
    for where, code in ran:
        place = definitions_at(module, classes, where)
        if digest(place) != code:
            return False
        new.define(place)
        if where[0] in classes:
            called.setdefault(classes[where[0]], set()).add(where[1])
    read = {steps for steps, _ in reads.values}
    for path, part in parts_of(module, reads):
        steps = tuple(path.split(".")) if path else ()
        for name in called[classes[path]]:
            if (*steps, name) not in read:
                new.add(vars(part), name, MISSING)
    return True


def parts_of(module: nn.Module, reads: Reads) -> Iterator[tuple[str, Any]]:
    """The model and its parts."""
    yield "", module
    for path, _ in reads.parts:
        yield path, found(module, tuple(path.split(".")))


def place_of(module: nn.Module, path: Path) -> dict[str, Any] | None:
    """The dict of a module that has the attribute at a path; None for other objects."""
    if path[0] == GLOBALS:
        return None
    owner = found(module, path[:-1]) if len(path) > 1 else module
    if not isinstance(owner, nn.Module):
        return None
    own = vars(owner)
    places = (own, own["_parameters"], own["_buffers"], own["_modules"])
    return next((place for place in places if path[-1] in place), None)


def forget(module: nn.Module) -> None:
    """Remove the conditions of a model, which hold its parts."""
    vars(module).pop(KEPT, None)


def is_unchanged(module: nn.Module, reads: Reads, children: Children, ran: Ran) -> bool:
    """Whether a model is the one that was traced, and has no hooks."""
    if _has_any_global_hook():
        return False
    kept = vars(module).get(KEPT)
    if kept is not None and kept.owner() is module and kept.hold(module):
        return True
    vars(module)[KEPT] = new = conditions_of(module, reads, children, ran)
    return new is not None
