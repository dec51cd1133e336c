"""Forwards that users have registered for classes of modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import random_copy


@dataclass(frozen=True)
class Registered(Plan):
    """A forward that a user has registered."""

    kind = "registered"
    saved_as = "registered"
    function: Callable[..., Any]

    def __str__(self) -> str:
        return self.function.__qualname__

    def forward(self, module: nn.Module, *args: Any) -> Any:
        """The result of the registered function."""
        return self.function(module, *args)


class Registry:
    """The registered forwards by class."""

    def __init__(self) -> None:
        self.entries: dict[type[nn.Module], tuple[Plan, Callable[[Any], Tensor]]] = {}

    def add(
        self,
        cls: type[nn.Module],
        forward: Callable[..., Any],
        inputs: Callable[[Any], Tensor],
    ) -> None:
        """Add a forward for a class, or replace the registered one."""
        self.entries[cls] = (Registered(forward), inputs)

    def remove(self, cls: type[nn.Module]) -> None:
        """Remove the forward of a class."""
        if cls not in self.entries:
            raise KeyError(
                f"torchkiln.replace.unregister: cls: got {cls.__name__}, expected a class that was "
                "registered"
            )
        del self.entries[cls]

    def find(self, module: nn.Module) -> Match | None:
        """The forward for exactly the class of a module."""
        entry = self.entries.get(type(module))
        if entry is None:
            return None
        plan, inputs = entry
        return Match(plan, random_copy(module), (inputs(module),))
