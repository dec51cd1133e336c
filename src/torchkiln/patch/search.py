"""Searches for an op that computes the same as a module; the result is a plan or a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchkiln.patch.compare import Comparison, compare
from torchkiln.patch.formula import activation, gated, gated_norm, linear, norm, torch_modules
from torchkiln.patch.formula.proven import ProvenPlan
from torchkiln.patch.formula.reads import MACHINERY, Reads
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.plan import Found, Match
from torchkiln.patch.probe import first_dtype
from torchkiln.patch.registry import Registry
from torchkiln.patch.report import Replacement


class Outcome(NamedTuple):
    """The result for a module, and for modules whose attributes are equal."""

    found: Found
    comparison: Comparison | str | None
    reads: Reads


class Search:
    """Finds the plan of a module, once for all modules with equal attributes."""

    def __init__(self, registry: Registry, *, exact: bool, light: bool = False) -> None:
        self.by_class = (registry.find, linear.find, torch_modules.find)
        self.by_formula = (gated_norm.find, norm.find, activation.find, gated.find)
        self.exact, self.light = exact, light
        self.known: dict[Any, list[Outcome]] = {}

    def find(
        self, module: nn.Module, default: torch.dtype, row: Replacement, kinds: tuple[str, ...]
    ) -> Match | None:
        """The plan of a module, or None with the reason in the row."""
        if row.reason or (before := replaced_before(module)):
            row.reason = row.reason or before
            return None
        if any(is_lazy(x) for x in module.parameters()):
            row.reason = "its parameters have no sizes yet"
            return None
        dtype = first_dtype(module.parameters()) or default
        device = next((x.device for x in module.parameters()), torch.device("cpu"))
        device = torch.device("cpu") if device.type == "meta" else device
        found, comparison, _ = self.cached(module, dtype, device)
        if not isinstance(found, Match):
            is_leaf = next(module.children(), None) is None
            own = next(module.parameters(recurse=False), None) is not None
            row.reason = found or ("no op of torchkiln" if is_leaf or own else "")
            return None
        if self.light:
            found = replace(found, plan=found.plan.light())
        row.kind, row.now = found.plan.kind, str(found.plan)
        if row.kind not in kinds:
            row.reason = f"only {', '.join(kinds)}"
        elif isinstance(comparison, str):
            row.reason = comparison
        elif comparison is not None:
            comparison.record(row)
            row.reason = comparison.refusal(exact=self.exact)
            if not found.plan.rounds_alike:
                row.bitwise = False
                row.reason = "not bitwise equal" if self.exact else row.reason
        return None if row.reason else found

    def cached(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> Outcome:
        """The outcome for a module, shared by modules whose forwards read the same attributes."""
        known = self.known.setdefault((type(module), dtype, device, kinds_of(module)), [])
        for outcome in known:
            if outcome.reads.hold(module):
                return outcome
        try:
            known.append(self.outcome(module, dtype, device))
        except Exception as error:  # a user's forward may raise any error
            reason = f"its search raised {type(error).__name__}: {error}"
            known.append(Outcome(reason, None, Reads(own_values(module))))
        return known[-1]

    def outcome(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> Outcome:
        """The plan and its comparison, or the reason why there is no plan, or None for both."""
        for find_by_class in self.by_class:
            if found := find_by_class(module):
                compared = compare(found, dtype, device) if isinstance(found, Match) else None
                return Outcome(found, compared, Reads(own_values(module)))
        reason: str | None = None
        for find in self.by_formula:
            try:
                found = find(module, dtype)
            except NoFormulaError as error:
                found = str(error)
            if isinstance(found, str):
                reason = reason or found
            elif found is not None and isinstance(found.plan, ProvenPlan):
                return Outcome(found, compare(found, dtype, device), found.plan.reads)
        return Outcome(reason, None, Reads(own_values(module)))


def kinds_of(module: nn.Module) -> tuple[Any, ...]:
    """Names, shapes, dtypes, classes of parameters, without values; classes of submodules."""
    tensors = (
        (name, tuple(x.shape), x.dtype, type(x), x.layout) for name, x in module.named_parameters()
    )
    return *tensors, *((name, type(child)) for name, child in module.named_modules())


def own_values(module: nn.Module) -> tuple[tuple[tuple[str, ...], Any], ...]:
    """All attributes of a module and of its submodules that are no tensors."""
    return tuple(
        ((*filter(None, prefix.split(".")), name), value)
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in MACHINERY and not isinstance(value, Tensor)
    )


def replaced_before(module: nn.Module) -> str:
    """The reason if the forward is torchkiln's, or an attribute of the instance; else empty."""
    if hasattr(type(module), "_kiln_plan") or type(module).__module__.startswith("torchkiln.nn"):
        return "is torchkiln's already"
    if "forward" in vars(module):
        owner = getattr(vars(module)["forward"], "__module__", "another library")
        return f"its forward is an attribute of the instance, set by {owner}"
    return ""
