"""Keeps a run within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from torchkiln.bench.measure import Settings
from torchkiln.bench.peers import COMPILE, QUACK, TORCHAO

BUILDERS = (COMPILE, QUACK, TORCHAO)
"""Peers that compile kernels for every new shape."""

LEAST = 0.05
"""Seconds for the measurements of a row, however little time is left."""


class Budget:
    """Divides the remaining time among the remaining pieces, and the time of a piece among rows.

    Some peers take seconds to compile, longer than all measurements of a row. With a limit, these
    peers are timed only in the first call of each op in one dtype, and only while enough time is
    left for all other rows. Without a limit, settings do not change.
    """

    def __init__(
        self,
        seconds: float | None = None,
        rows: int = 0,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds = seconds
        self.now = now
        self.begun = now()
        self.rows = rows
        """Rows of the pieces that have not begun."""
        self.end_of_piece = self.begun
        self.rows_of_piece = 0
        self.overhead = 0.3
        """Mean seconds per row outside the measurements, for tensors and warm-up."""
        self.compiling = 6.0
        """Mean seconds per row in addition to the measurements, if BUILDERS are among the peers."""

    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.seconds is not None and self.left() <= 0

    def left(self) -> float:
        """Seconds until the limit."""
        assert self.seconds is not None
        return self.begun + self.seconds - self.now()

    def begin(self, rows: int) -> None:
        """Start the next piece, which has about ``rows`` rows."""
        if self.seconds is not None:
            share = rows / max(rows, self.rows)
            self.end_of_piece = self.now() + self.left() * share
        self.rows -= rows
        self.rows_of_piece = rows

    def settings(self, usual: Settings, *, first: bool) -> Settings:
        """Settings for the next row; ``first`` allows BUILDERS if there is time."""
        if self.seconds is None:
            return usual
        share = (self.end_of_piece - self.now()) / max(1, self.rows_of_piece)
        self.rows_of_piece -= 1
        budget = min(usual.budget, max(LEAST, share - self.overhead))
        others = (self.rows + max(0, self.rows_of_piece)) * (self.overhead + LEAST)
        if first and self.left() - others > self.compiling:
            return replace(usual, budget=budget)
        names = tuple(name for name in usual.peers if name not in BUILDERS)
        why = f"left out, to be done within {self.seconds / 60:.3g} minutes"
        left_out = {name: why for name in usual.peers if name in BUILDERS}
        return replace(usual, budget=budget, peers=names, left_out=left_out)

    def took(self, seconds: float, settings: Settings) -> None:
        """Update the mean overhead with the duration of a row."""
        overhead = max(0.0, seconds - settings.budget)
        if any(name in BUILDERS for name in settings.peers):
            self.compiling = 0.8 * self.compiling + 0.2 * overhead
        else:
            self.overhead = 0.8 * self.overhead + 0.2 * overhead
