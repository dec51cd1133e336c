"""The modules of a model that rotate queries and keys, and those that make cos and sin for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from torchkiln.patch.compare import Comparison
from torchkiln.patch.probe import first_dtype
from torchkiln.patch.source.angles import rewrite_angles
from torchkiln.patch.source.code import forward_of, properties
from torchkiln.patch.source.rope_calls import RopeCall, rewrite_ropes
from torchkiln.patch.source.text import definition

UNKNOWN = "no module is known to make cos and sin that have each factor twice"
"""The reason to keep a rotation that reads all columns of cos."""


class OfClass(NamedTuple):
    """The rotations in a class's forward, and the equal columns of the angles that it returns."""

    calls: tuple[RopeCall, ...] = ()
    factors: str = ""


@dataclass
class Rotary:
    """The modules to rewrite for rotations."""

    errors: dict[nn.Module, list[Comparison]] = field(default_factory=dict)
    """The modules that rotate, with the errors of each call."""
    angles: set[nn.Module] = field(default_factory=set)
    """The modules that make cos and sin for rotations."""
    reasons: dict[nn.Module, str] = field(default_factory=dict)
    """The reasons not to replace rotations of a module."""


def find(model: nn.Module, free: Mapping[str, nn.Module], *, exact: bool) -> Rotary:
    """The modules among ``free`` to rewrite for rotations.

    Cos and sin come from a child of the nearest module around the rotation that has such a child.
    """
    of: dict[type[nn.Module], OfClass] = {}
    default = first_dtype(model.parameters()) or torch.float32
    found = Rotary()
    makers: dict[str, list[tuple[nn.Module, str]]] = {}
    rotating: list[tuple[str, nn.Module, tuple[RopeCall, ...]]] = []
    for name, module in free.items():
        if not may_rotate(type(module)):
            continue
        cls = type(module)
        of[cls] = of[cls] if cls in of else of_class(cls)
        if of[cls].factors:
            makers.setdefault(name.rpartition(".")[0], []).append((module, of[cls].factors))
        if of[cls].calls:
            rotating.append((name, module, of[cls].calls))
    for name, module, calls in rotating:
        near = next((makers[path] for path in around(name) if path in makers), [])
        errors = [errors_of(call, module, default) for call in calls]
        kept = [x for x in errors if isinstance(x, Comparison)]
        reasons = [x for x in errors if isinstance(x, str)]
        reasons += [missing(call, near) for call in calls]
        if exact and not all(one.bitwise for one in kept):
            reasons.append("not bitwise equal")
        if any(reasons):
            found.reasons[module] = next(filter(None, reasons))
            continue
        found.errors[module] = kept
        wanted = frozenset[str]().union(*(call.factors for call in calls))
        found.angles |= {maker for maker, factors in near if factors in wanted}
    return found


def around(name: str) -> Iterator[str]:
    """The name of a module, and the names of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def missing(call: RopeCall, near: list[tuple[nn.Module, str]]) -> str:
    """The reason if no near module gives cos and sin each factor twice, as the call requires."""
    has = not call.factors or any(factors in call.factors for _, factors in near)
    return "" if has else UNKNOWN


def errors_of(call: RopeCall, module: nn.Module, default: torch.dtype) -> Comparison | str:
    """The errors of function and op in the dtype of a module, or the reason to keep the call."""
    if call.compare is None:
        return call.reason
    dtype = first_dtype(module.parameters()) or default
    device = next((x.device for x in module.parameters()), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    found = call.compare((dtype, dtype), device)
    return found or f"its result has another dtype than {dtype}"


def may_rotate(cls: type[nn.Module]) -> bool:
    """Whether a forward calls a global function of four arguments, or joins cosines."""
    function: Any = inspect.unwrap(cls.forward)
    if not isinstance(function, FunctionType) or cls.__module__.startswith("torch."):
        return False
    names = function.__code__.co_names
    if "cos" in names and {"cat", "repeat_interleave"} & {*names}:
        return True
    values = [function.__globals__.get(name) for name in names]
    return any(isinstance(x, FunctionType) and x.__code__.co_argcount >= 4 for x in values)


def of_class(cls: type[nn.Module]) -> OfClass:
    """The rotations and angles of a class, if its source compiles to the code that runs."""
    function = forward_of(cls)
    node = function if isinstance(function, str) else definition(function)
    if isinstance(function, str) or isinstance(node, str):
        return OfClass()
    calls = rewrite_ropes(node, function)
    return OfClass(tuple(calls), rewrite_angles(node, function, properties(cls)))
