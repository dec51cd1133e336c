"""Errors and times of replacements on the inputs of a real batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.bench.clock import Times, device_clock, in_turns
from torchkiln.patch.compare import Comparison, of_calls
from torchkiln.patch.plan import Match
from torchkiln.patch.probe import first_dtype
from torchkiln.patch.report import Replacement

BUDGET = 0.05
"""Seconds of measurement per module."""

Matches = Sequence[tuple[Replacement, nn.Module, Match]]


def measure(model: nn.Module, matches: Matches, example: Any) -> None:
    """Run the model once, then both forwards of each module on the module's input in that run."""
    given = arguments_of_modules(model, [module for _, module, _ in matches], example)
    for row, module, match in matches:
        args = given.get(module)
        if args is None:
            continue
        floating = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        dtype = first_dtype(floating)
        if dtype is None or not match.plan.fits(module, *args):
            continue
        found = of_calls(module, match.plan, [args], dtype)
        if isinstance(found, Comparison):
            found.record(row)
        forwards = {
            "was": torch.no_grad()(partial(type(module).forward, module, *args)),
            "now": torch.no_grad()(partial(match.plan.forward, module, *args)),
        }
        times = in_turns(device_clock(floating[0].device), forwards, BUDGET)
        row.seconds_was, row.seconds_now = (
            Times.of(times[name]).seconds for name in ("was", "now")
        )


def arguments_of_modules(
    model: nn.Module, modules: Sequence[nn.Module], example: Any
) -> dict[nn.Module, tuple[Any, ...]]:
    """The arguments of the first call of each module, in evaluation mode, without gradients."""
    given: dict[nn.Module, tuple[Any, ...]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not options:
            given.setdefault(module, args)

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            if isinstance(example, Mapping):
                model(**example)
            else:
                model(*example if isinstance(example, tuple) else (example,))
    finally:
        for hook in hooks:
            hook.remove()
        for module, was in training.items():
            module.training = was
    return given
