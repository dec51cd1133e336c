"""A run: all rows of a plan, measured one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from torchkiln.bench.case import BACKWARD, FORWARD, named
from torchkiln.bench.clock import LoadMeter, device_clock
from torchkiln.bench.measure import Settings
from torchkiln.bench.peers import PEERS
from torchkiln.bench.plan import DTYPES, Plan, Shape, default_device
from torchkiln.bench.result import Measurement, Record, Skipped
from torchkiln.testing import SPECS, OpSpec
from torchkiln.testing.environment import environment

DIRECTIONS = {FORWARD: (FORWARD,), BACKWARD: (BACKWARD,), "both": (FORWARD, BACKWARD)}
"""The measured directions for each value of ``direction``."""


class Progress(Protocol):
    """A display of the progress of a run."""

    def begin(self, words: str) -> None:
        """Start the next piece."""

    def done(self, row: Measurement) -> None:
        """Show a row."""


class Silent:
    """A display that shows nothing."""

    def begin(self, words: str) -> None:
        """Do nothing."""

    def done(self, row: Measurement) -> None:
        """Do nothing."""


def measure(chosen: Plan, display: Progress) -> tuple[Record, bool]:
    """Measure all rows; the flag is false after Ctrl-C."""
    rows: list[Measurement] = []
    skipped: list[Skipped] = []
    meter = LoadMeter(chosen.device)
    whole = True
    try:
        for words, found in chosen.pieces():
            display.begin(words)
            for entry in found:
                if isinstance(entry, Skipped):
                    skipped.append(entry)
                else:
                    rows.append(entry)
                    display.done(entry)
    except KeyboardInterrupt:
        whole = False
    return Record(environment(chosen.device), tuple(rows), tuple(skipped), meter.read()), whole


def run(
    *ops: str,
    specs: Sequence[OpSpec] = SPECS,
    device: torch.device | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    shapes: Sequence[Shape] = (),
    direction: Literal["forward", "backward", "both"] = "both",
    peers: Sequence[str] = PEERS,
    within: float | None = None,
) -> Record:
    """Time large calls of ops, their peers and their ceiling, as ``torchkiln bench`` does.

    Args:
        *ops: names of ops; all by default.
        specs: the specs to take them from, such as those of your package.
        device: the first GPU by default, if there is one.
        dtypes: those that an op takes are timed.
        shapes: pairs of rows and columns; by default chosen for each op.
        direction: ``forward``, ``backward`` or ``both``.
        peers: of ``eager``, ``compile``, ``liger``, ``quack``, ``cudnn``, ``torchao``, ``trl`` (its
            formula) and ``torch`` (its function of the name), where installed.
        within: limit of the whole run, in seconds; rows without time are in ``skipped``.

    Raises:
        ValueError: an op has no spec.
    """
    place = device or default_device()
    threads = torch.get_num_threads() if place.type == "cpu" else None
    chosen = Plan(
        specs=tuple(named(list(ops), specs)),
        device=place,
        settings=Settings(device_clock(place), tuple(peers)),
        shapes=tuple(shapes),
        dtypes=tuple(dtypes),
        directions=DIRECTIONS[direction],
        threads=(threads,),
        within=within,
    )
    record, whole = measure(chosen, Silent())
    if not whole:
        raise KeyboardInterrupt
    return record
