"""Errors of replacements on the inputs of a real batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from torchkiln.patch.calls import Given
from torchkiln.patch.compare import Comparison, of_calls
from torchkiln.patch.plan import Match
from torchkiln.patch.probe import first_dtype
from torchkiln.patch.report import Replacement

Matches = Sequence[tuple[Replacement, nn.Module, Match]]


def measure(matches: Matches, calls: Mapping[nn.Module, Given]) -> None:
    """Runs the old and the new forward of each module on its input in a call of the model."""
    for row, module, match in matches:
        args = calls[module].args if module in calls else ()
        floating = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        dtype = first_dtype(floating)
        if dtype is None or calls[module].options or not match.plan.fits(module, *args):
            continue
        with evaluated(module):
            found = of_calls(module, match.plan, [args], dtype)
        if isinstance(found, Comparison):
            found.record(row)


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """A context in evaluation mode: dropouts would make results of old and new forward differ."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was in training.items():
            part.training = was
