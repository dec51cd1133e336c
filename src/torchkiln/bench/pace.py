"""Keeps a run within a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from torchkiln.bench.measure import Settings
from torchkiln.bench.peers import COMPILE, QUACK

BUILDERS = (COMPILE, QUACK)
"""Peers that compile kernels for every new shape."""

LEAST = 0.05
"""Seconds for a row's measurements, however late it is."""


class Pace:
    """Shares what is left of the time among the pieces that are left, and in them among their rows.

    What some peers build for a row takes seconds, more than all measurements of it. So they take
    part in few: the first call of each op in one dtype, while enough is left for all other rows.
    Without a limit everything is as usual.
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
        """Of the pieces that have not begun."""
        self.end_of_piece = self.begun
        self.rows_of_piece = 0
        self.beside = 0.3
        """Seconds that a row takes beside its budget, on average so far."""
        self.compiling = 6.0
        """The same of rows in which those take part that build."""

    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.seconds is not None and self.left() <= 0

    def left(self) -> float:
        """Seconds."""
        assert self.seconds is not None
        return self.begun + self.seconds - self.now()

    def begin(self, rows: int) -> None:
        """The next piece, of about so many rows: it has its share of what is left."""
        if self.seconds is not None:
            share = rows / max(rows, self.rows)
            self.end_of_piece = self.now() + self.left() * share
        self.rows -= rows
        self.rows_of_piece = rows

    def settings(self, usual: Settings, *, first: bool) -> Settings:
        """For the next row; ``first``: peers that build may take part."""
        if self.seconds is None:
            return usual
        share = (self.end_of_piece - self.now()) / max(1, self.rows_of_piece)
        self.rows_of_piece -= 1
        budget = min(usual.budget, max(LEAST, share - self.beside))
        others = (self.rows + max(0, self.rows_of_piece)) * (self.beside + LEAST)
        if first and self.left() - others > self.compiling:
            return replace(usual, budget=budget)
        names = tuple(name for name in usual.peers if name not in BUILDERS)
        why = f"left out, to be done within {self.seconds / 60:.3g} minutes"
        left_out = {name: why for name in usual.peers if name in BUILDERS}
        return replace(usual, budget=budget, peers=names, left_out=left_out)

    def took(self, seconds: float, settings: Settings) -> None:
        """Learn from a row."""
        beside = max(0.0, seconds - settings.budget)
        if any(name in BUILDERS for name in settings.peers):
            self.compiling = 0.8 * self.compiling + 0.2 * beside
        else:
            self.beside = 0.8 * self.beside + 0.2 * beside
