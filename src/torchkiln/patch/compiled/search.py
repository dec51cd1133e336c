"""The formulas of regions, by the search of ``replace``, once for equal regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchkiln.patch.compare import Comparison, compare
from torchkiln.patch.compiled.facts import Facts, value_of
from torchkiln.patch.compiled.region import Region
from torchkiln.patch.formula.proven import ProvenPlan
from torchkiln.patch.plan import Match
from torchkiln.patch.probe import usual_modes

KNOWN: dict[Any, Any] = {}
"""The outcomes of all searches in this process, by key."""

Find = Callable[[nn.Module, torch.dtype], Any]
"""A function that searches a module for a formula."""


def once(key: Any, function: Callable[[], Any]) -> Any:
    """The outcome of a search; None if it raises: there is no formula, or an op of users fails."""
    if key not in KNOWN:
        try:
            with usual_modes():
                KNOWN[key] = function()
        except Exception:
            KNOWN[key] = None
    return KNOWN[key]


def plan_of(facts: Facts, part: Region, module: nn.Module, find: Find) -> ProvenPlan | None:
    """The plan of a region, as a module, for its sources and for the modes that it runs in."""
    x = value_of(part.sources[0])
    sizes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    key = (vars(module)["source"], find, sizes, x.dtype, x.device)
    plan: ProvenPlan | None = once(key, lambda: searched(module, find, x.dtype, x.device))
    proof = None if plan is None else plan.proof
    if proof is None or x.dim() not in proof.ranks or x.dtype not in proof.dtypes:
        return None
    is_kept = proof.keeps_dtype or x.dtype is torch.float32
    return plan if is_kept or not facts.is_narrowed(part.result) else None


def searched(
    module: nn.Module, find: Find, dtype: torch.dtype, device: torch.device
) -> ProvenPlan | None:
    """The plan of a match, if its comparison has no refusal."""
    found = find(module, dtype)
    if not isinstance(found, Match) or not isinstance(found.plan, ProvenPlan):
        return None
    comparison = compare(found, dtype, device)
    is_right = isinstance(comparison, Comparison) and not comparison.refusal(exact=False)
    return found.plan if is_right else None
