"""The part of a model that can compute its convolutions in ``channels_last``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from torchkiln.patch.calls import Given, calls_of_modules, preserved
from torchkiln.patch.finding import Skip, is_skipped
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.graph import channels_last
from torchkiln.patch.graph.channels_last import ChannelsLast, is_in_order
from torchkiln.patch.graph.unchanged import forget
from torchkiln.patch.measure import evaluated
from torchkiln.patch.plan import Candidate, made_class
from torchkiln.patch.probe import relative_error
from torchkiln.patch.report import Replacement
from torchkiln.patch.search import replaced_before

LARGEST_DIFFERENCE = 0.1
"""The largest difference between results of the old and the new forward, relative to the result.
Convolutions add in another order, and in TensorFloat-32 or half precision. Elements in wrong places
differ by about 1."""


def found(
    model: nn.Module,
    example: Any,
    candidates: Iterable[Candidate],
    skip: Skip,
    rows: list[Replacement],
) -> Candidate | None:
    """The largest part of a model that holds most of its convolutions and has a proof.

    Adds a row for this part; for the model, with the reason, if there is none.
    """
    parts = parts_of(model)
    if not parts:
        return None
    calls = calls_of_modules(model, list(parts.values()), example)
    own = {one.module for one in candidates if one.plan.kind == "registered"}
    first: Replacement | None = None
    for name, module in parts.items():
        row = Replacement(f"{name}.channels_last".lstrip("."), type(module).__name__)
        row.kind = ChannelsLast.kind
        plan: ChannelsLast | str = "a registered forward may depend on strides"
        if own.isdisjoint(module.modules()):
            plan = plan_for(row.name, module, calls.get(module), skip, model)
        if isinstance(plan, ChannelsLast):
            row.now = str(plan)
            rows.append(row)
            return Candidate((row,), module, plan)
        row.reason = plan
        first = first or row
        if plan == "skip":
            break
    assert first is not None
    rows.append(first)
    return None


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The model, its child with at least half of the convolutions, a child of this, and so on."""
    parts: dict[str, nn.Module] = {}
    name, module, total = "", model, convolutions(model)
    while total > 0:
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            parts[name] = module
        inside = {child: convolutions(part) for child, part in module.named_children()}
        largest = max(inside, key=inside.__getitem__, default="")
        if not largest or 2 * inside[largest] < total or inside[largest] < 2:
            break
        name, module = f"{name}.{largest}".lstrip("."), module.get_submodule(largest)
    return parts


def convolutions(module: nn.Module) -> int:
    """The number of convolutions of images in a module."""
    return sum(isinstance(part, nn.Conv2d) for part in module.modules())


def plan_for(
    name: str, module: nn.Module, given: Given | None, skip: Skip, model: nn.Module
) -> ChannelsLast | str:
    """The plan of a module, or the reason why there is none."""
    if is_skipped(name, module, skip) or is_skipped(name.rpartition(".")[0], module, skip):
        return "skip"
    if given is None or given.options:
        return "the example does not call it, or with keyword arguments"
    if why := replaced_before(module):
        return why
    try:
        plan = channels_last.find(module, given.args)
        made_class(type(module), plan)
    except NoFormulaError as error:
        return str(error)
    except Exception as error:  # a user's class may raise any error
        return f"its search raised {type(error).__name__}: {error}"
    return why_other_results(module, plan, given, model) or plan


def why_other_results(module: nn.Module, plan: ChannelsLast, given: Given, model: nn.Module) -> str:
    """The reason if results differ in more than rounding or are not contiguous; else empty."""
    own = type(module)
    with preserved(model), evaluated(model), torch.no_grad():
        try:
            right, form = tree_flatten(module(*given.args))
            module.__class__ = made_class(own, plan)
            results, same_form = tree_flatten(module(*given.args))
        except Exception as error:
            return f"it raised {type(error).__name__}: {error}"
        finally:
            module.__class__ = own
            forget(module)
    if form != same_form or not all(map(is_result, right)):
        return "its results are no contiguous tensors"
    return "" if all(map(is_close, results, right)) else "its results differ"


def is_result(value: Any) -> bool:
    """Whether a result can be given back: a contiguous tensor, or no tensor."""
    return value is None or (type(value) is Tensor and is_in_order(value))


def is_close(one: Any, other: Any) -> bool:
    """Whether two results have the same shape and dtype, and differ by rounding only."""
    if not isinstance(one, Tensor):
        return one is other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    finite = other.isfinite()
    is_same = torch.equal(finite, one.isfinite())
    return is_same and relative_error(one[finite], other[finite].double()) <= LARGEST_DIFFERENCE
