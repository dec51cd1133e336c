"""The search for the plan of a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchkiln.patch.compare import Comparison, compare
from torchkiln.patch.formula import (
    activation,
    gated,
    gated_norm,
    linear,
    norm,
    torch_modules,
)
from torchkiln.patch.plan import Found, Match
from torchkiln.patch.probe import first_dtype
from torchkiln.patch.registry import Registry
from torchkiln.patch.report import Row


class Search:
    """Finds the plan of a module, once for modules that are alike."""

    def __init__(self, registry: Registry, *, exact: bool) -> None:
        self.finders = (
            registry.find,
            linear.find,
            torch_modules.find,
            gated_norm.find,  # before norms, which some of these compute without a gate
            norm.find,
            activation.find,
            gated.find,
        )
        self.exact = exact
        self.known: dict[Any, tuple[Found, Comparison | str | None]] = {}

    def find(
        self, module: nn.Module, default: torch.dtype, row: Row, kinds: tuple[str, ...]
    ) -> Match | None:
        """The plan of a module, or None with the reason in the row."""
        if row.why or (before := replaced_before(module)):
            row.why = row.why or before
            return None
        if any(is_lazy(x) for x in module.parameters()):
            row.why = "its parameters have no sizes yet"
            return None
        dtype = first_dtype(module.parameters()) or default
        device = next((x.device for x in module.parameters()), torch.device("cpu"))
        device = torch.device("cpu") if device.type == "meta" else device
        found, comparison = self.cached(module, dtype, device)
        if not isinstance(found, Match):
            is_leaf = next(module.children(), None) is None
            own = next(module.parameters(recurse=False), None) is not None
            row.why = found or ("no op of torchkiln" if is_leaf or own else "")
            return None
        row.kind, row.now = found.plan.kind, str(found.plan)
        if row.kind not in kinds:
            row.why = f"only {', '.join(kinds)}"
        elif isinstance(comparison, str):
            row.why = comparison
        elif comparison is not None:
            row.same = comparison.same
            row.error_was, row.error_now = comparison.was, comparison.now
            row.why = comparison.refusal(exact=self.exact)
            if not found.plan.rounds_alike:
                row.same = "other rounding"
                row.why = "not bitwise equal" if self.exact else row.why
        return None if row.why else found

    def cached(
        self, module: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> tuple[Found, Comparison | str | None]:
        """What the finders say, and the comparison of a match."""
        key = (type(module), dtype, device, settings(module))
        if key not in self.known:
            found = next((f for f in (find(module) for find in self.finders) if f), None)
            comparison = None
            if isinstance(found, Match):
                comparison = compare(found, dtype, device)
            self.known[key] = (found, comparison)
        return self.known[key]


def settings(module: nn.Module) -> tuple[Any, ...]:
    """What the forward of a small module depends on, apart from the values of its tensors."""
    numbers = (
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, (int, float, str, tuple)) and name != "training"
    )
    tensors = (
        (name, tuple(x.shape), x.dtype, type(x), x.layout) for name, x in module.named_parameters()
    )
    classes = ((name, type(child)) for name, child in module.named_modules())
    functions = ((name, id(value)) for name, value in vars(module).items() if callable(value))
    return (*numbers, *tensors, *classes, *functions)


def replaced_before(module: nn.Module) -> str:
    """Whose forward a module has, if it is not that of its class; empty otherwise."""
    if hasattr(type(module), "_kiln_plan") or type(module).__module__.startswith("torchkiln.nn"):
        return "is torchkiln's already"
    if "forward" in vars(module):
        owner = getattr(vars(module)["forward"], "__module__", "another library")
        return f"its forward is an attribute of the instance, set by {owner}"
    return ""
