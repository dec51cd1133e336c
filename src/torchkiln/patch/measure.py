"""Errors of replacements on the inputs of a real batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from torchkiln.patch.compare import Comparison, of_calls
from torchkiln.patch.plan import Match
from torchkiln.patch.probe import first_dtype
from torchkiln.patch.report import Replacement
from torchkiln.patch.trial import Given

Matches = Sequence[tuple[Replacement, nn.Module, Match]]


def measure(matches: Matches, calls: Mapping[nn.Module, Given]) -> None:
    """Runs both forwards of each module on the module's input in a call of the model."""
    for row, module, match in matches:
        args = calls[module].args if module in calls else ()
        floating = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        dtype = first_dtype(floating)
        if dtype is None or calls[module].options or not match.plan.fits(module, *args):
            continue
        found = of_calls(module, match.plan, [tuple(map(detached, args))], dtype)
        if isinstance(found, Comparison):
            found.record(row)


def detached(value: object) -> object:
    """The value; a tensor without its gradient."""
    return value.detach() if isinstance(value, Tensor) else value
