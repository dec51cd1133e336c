"""The forms of a model that are timed on a batch, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from torchkiln.patch import images
from torchkiln.patch.calls import Conversion, calls_of_modules
from torchkiln.patch.finding import Skip
from torchkiln.patch.graph.channels_last import ChannelsLast, given_back
from torchkiln.patch.measure import Matches, measure
from torchkiln.patch.plan import Candidate
from torchkiln.patch.report import Replacement

LEAST_GAIN = 1.02
"""The strides of all activations change only if the model takes this multiple of the time without:
more than the medians of two equal forms differ."""

NOT_FASTER = f"the model is not {LEAST_GAIN - 1:.0%} faster on the example"
"""The reason of a model whose activations keep their strides."""

States = list[dict[str, Any]]


def tried(
    model: nn.Module,
    matches: Matches,
    candidates: Sequence[Candidate],
    example: Any,
    rows: list[Replacement],
    *,
    skip: Skip,
    by_channels: bool,
) -> tuple[list[Candidate], list[float]]:
    """The candidates of the fastest form, and the seconds of the model before and after.

    The forms are the model with the modules that are faster, and, with ``by_channels``, the model
    in ``channels_last`` with the modules that are faster there.
    """
    from torchkiln.patch.trial import (  # noqa: PLC0415  imports the benchmark
        MODEL_SLOWER,
        Trial,
        refuse,
        seconds_of_model,
    )

    modules = [module for _, module, _ in candidates]
    calls = calls_of_modules(model, modules, example)
    measure(matches, calls)
    around = images.found(model, example, candidates, skip, rows) if by_channels else None
    start = states(rows)
    usual = Trial(model, candidates).run(calls)
    called = [one for one in usual if one.module in calls]
    forms = [called] if called else []
    if around is not None:
        with_usual = states(rows)
        restore(rows, start)
        assert isinstance(around.plan, ChannelsLast)
        conversion = Conversion(around.plan.converted, given_back)
        calls = calls_of_modules(model, modules, example, {around.module: conversion})
        last = Trial(model, candidates, around).run(calls)
        forms.append([one for one in last if one is around or one.module in calls])
        with_last = states(rows)
        restore(rows, with_usual)
    if not forms:
        return usual, []
    was, *seconds = seconds_of_model(model, example, forms)
    now = seconds[:1] if called else []
    if now > [was]:
        refuse(called, MODEL_SLOWER)
        usual = [one for one in usual if one not in called]
    if around is not None:
        without = min([was, *now])
        if LEAST_GAIN * seconds[-1] <= without:
            restore(rows, with_last)
            note(around, without, seconds[-1])
            return last, [was, seconds[-1]]
        refuse([around], NOT_FASTER)
        note(around, without, seconds[-1])
    return usual, [was, *now] if now else []


def states(rows: Sequence[Replacement]) -> States:
    """The contents of rows."""
    return [vars(row).copy() for row in rows]


def restore(rows: Sequence[Replacement], contents: States) -> None:
    """Give rows the contents that they had."""
    for row, content in zip(rows, contents, strict=True):
        vars(row).update(content)


def note(one: Candidate, was: float, now: float) -> None:
    """Write the times of the model into the rows of a candidate."""
    for row in one.rows:
        row.seconds_was, row.seconds_now = was, now
