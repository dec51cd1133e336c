"""Calls of an op: valid calls, refused calls, and the bytes and operations of a call."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Result = Tensor | tuple[Tensor, ...]
"""The return value of an op."""

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


SIGNATURES: WeakKeyDictionary[Any, tuple[int | None, list[str]]] = WeakKeyDictionary()
"""Results of :func:`taken_by`, which a check needs once a call."""


def taken_by(function: Callable[..., Any]) -> tuple[int | None, list[str]]:
    """How many arguments a function takes by position, and the names of those it takes by keyword.

    The number is None if it takes any number.
    """
    kept = isinstance(function, (FunctionType, torch._ops.OpOverload))
    if kept and function in SIGNATURES:
        return SIGNATURES[function]
    count: int | None
    if isinstance(function, torch._ops.OpOverload):
        arguments = function._schema.arguments
        named = [a.name for a in arguments if a.kwarg_only]
        count = len(arguments) - len(named)
    else:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # a builtin function
            parameters = []
        named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        count = sum(p.kind not in {p.KEYWORD_ONLY, p.VAR_KEYWORD} for p in parameters)
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            count = None
    if kept:
        SIGNATURES[function] = count, named
    return count, named


@dataclass(frozen=True)
class Sample:
    """One named call. An argument that is a tensor in every call is positional.

    All tensors move between devices. Only positional tensors are tested at other strides,
    differentiated, and traced as inputs; keyword tensors, such as masks and weights, are not.
    ``args`` are in the order of the schema. Arguments that a function takes only by keyword are
    passed by keyword.

    Samples of an op that draws random numbers have a ``seed``. Every call seeds torch's generators
    with this number, so that the op and the reference draw the same numbers.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the tensors among the positional arguments."""
        return tuple(i for i, value in enumerate(self.args) if isinstance(value, Tensor))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the call, positional ones first."""
        values = (*self.args, *self.kwargs.values())
        return tuple(value for value in values if isinstance(value, Tensor))

    @property
    def numel(self) -> int:
        """Elements of the largest positional tensor."""
        return max(int(self.args[i].numel()) for i in self.positions)

    def map(self, function: Callable[[Tensor], Tensor]) -> Sample:
        """The same call with ``function`` applied to every tensor, also in named tuples."""

        def mapped(value: Any) -> Any:
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(mapped, value))
            return function(value) if isinstance(value, Tensor) else value

        args = tuple(map(mapped, self.args))
        return replace(self, args=args, kwargs={k: mapped(a) for k, a in self.kwargs.items()})

    def substitute(self, position: int, value: Any, suffix: str = "") -> Sample:
        """The call with another argument at ``position``."""
        args = (*self.args[:position], value, *self.args[position + 1 :])
        return replace(self, name=self.name + suffix, args=args)

    def start_generators(self) -> None:
        """Seed torch's generators, if the call has a seed.

        torch.manual_seed() would take 100 times as long, because it seeds all devices.
        """
        if self.seed is None:
            return
        if all(tensor.is_cpu for tensor in self.tensors):
            torch.default_generator.manual_seed(self.seed)
        else:
            torch.manual_seed(self.seed)

    def arguments(self, function: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments of a call of ``function``."""
        count, named = taken_by(function)
        if count is None:
            return self.args, dict(self.kwargs)
        by_name = dict(zip(named, self.args[count:], strict=False))
        has_surplus = len(self.args) > count + len(named)
        if has_surplus or by_name.keys() & self.kwargs.keys() or not named:
            return self.args, dict(self.kwargs)  # the function reports wrong arguments
        return self.args[:count], {**by_name, **self.kwargs}

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function with the arguments of the sample."""
        self.start_generators()
        args, kwargs = self.arguments(function)
        return function(*args, **kwargs)

    def bind(self, function: Callable[..., Any], positions: tuple[int, ...]) -> Callable[..., Any]:
        """``function`` of the arguments at ``positions``, with the sample's other arguments."""

        def bound(*values: Any) -> Any:
            call = self
            for position, value in zip(positions, values, strict=True):
                call = call.substitute(position, value)
            return call.call(function)

        return bound

    def take(self, positions: tuple[int, ...]) -> tuple[Any, ...]:
        """The arguments at ``positions``."""
        return tuple(self.args[i] for i in positions)


@dataclass(frozen=True)
class Invalid:
    """One call that must be refused, with the type of the error and a pattern of its message."""

    name: str
    args: tuple[Any, ...]
    error: type[Exception]
    message: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    advises: bool = False
    """Whether a remedy may follow the message, after a semicolon."""


@dataclass(frozen=True)
class Traffic:
    """The minimum bytes and operations of a call, for roofline figures."""

    bytes: int
    operations: int


def doubled(sample: Sample) -> Sample:
    """The call with every size other than 1 doubled, so that equal sizes stay equal."""
    return sample.map(lambda t: t.repeat([1 if n == 1 else 2 for n in t.shape]))
