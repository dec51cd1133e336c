"""The parts of a replacement: a plan, a found match, and the made class of a module."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn


class Plan(ABC):
    """Another forward for the modules of one formula; a frozen dataclass of picklable fields."""

    kind: ClassVar[str]
    takes_options: ClassVar[bool] = False
    """Whether the new forward takes keyword arguments."""
    rounds_alike: ClassVar[bool] = True
    """Whether a comparison of small tensors tells how the results of large ones are rounded."""

    @abstractmethod
    def __str__(self) -> str:
        """The call that the new forward makes, for the report."""

    @abstractmethod
    def forward(self, module: Any, *args: Any, **options: Any) -> Any:
        """The new forward."""

    def class_name(self, original: type[nn.Module]) -> str:
        """The name of the class with the new forward."""
        return f"Kiln{original.__name__}"

    def fits(self, _: Any, *__: Any) -> bool:
        """Whether the op takes this call; the original forward runs otherwise."""
        return True


@dataclass(frozen=True)
class Match:
    """A plan for a module, with what a comparison of both forwards needs."""

    plan: Plan
    copy: nn.Module
    """The module with random parameters, in float64."""
    inputs: tuple[Tensor, ...]
    """First arguments for separate calls, in float64."""
    others: tuple[Tensor, ...] = ()
    """Further arguments of each call, in float64."""


Found = Match | str | None
"""A match; or the reason to leave the module alone; or None: the module is of another kind."""

Finder = Callable[[nn.Module], Found]


def plan_of(module: Any) -> Plan | None:
    """The plan whose forward a module has; None if it, or a subclass, got another forward."""
    cls = type(module)
    is_made = getattr(cls, "_kiln_class", None) is cls and "forward" not in module.__dict__
    return cls._kiln_plan if is_made else None


MADE: dict[tuple[type[nn.Module], Plan], type[nn.Module]] = {}


def made_class(original: type[nn.Module], plan: Plan) -> type[nn.Module]:
    """A subclass of ``original`` with the forward of ``plan``, always the same one."""
    key = (original, plan)
    if key not in MADE:
        MADE[key] = make_class(original, plan)
    return MADE[key]


def make_class(original: type[nn.Module], plan: Plan) -> type[nn.Module]:
    """A new subclass of ``original`` with the forward of ``plan``."""

    @functools.wraps(original.forward, updated=())
    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        if (options and not plan.takes_options) or not plan.fits(self, *args):
            return original.forward(self, *args, **options)
        return plan.forward(self, *args, **options)

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        """Pickles and copies name the original class and the plan: the made class has no module."""
        parts = original.__reduce_ex__(self, protocol)
        assert isinstance(parts, tuple)  # a string names a global, which a module is not
        return (new_module, (original, plan), *parts[2:])

    made: Any = type(
        plan.class_name(original),
        (original,),
        {
            "__module__": original.__module__,
            "__doc__": original.__doc__,
            "forward": forward,
            "__reduce_ex__": reduce,
            "_kiln_plan": plan,
        },
    )
    made._kiln_class = made
    return made


def new_module(original: type[nn.Module], plan: Plan) -> nn.Module:
    """An empty module of the made class, which unpickling fills."""
    made = made_class(original, plan)
    return made.__new__(made)
