"""What has changed between two runs, beyond their noise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchkiln.bench.record import Record
from torchkiln.bench.row import Row
from torchkiln.bench.table import Table, duration

Key = tuple[object, ...]

THRESHOLD = 0.05
"""A change of less is none."""


def key(row: Row) -> Key:
    """What two runs have to have in common for a row to be compared."""
    return row.kind, row.op, row.variant, row.dtype, row.shape, row.direction, row.threads


@dataclass(frozen=True)
class Change:
    """A row of both runs."""

    old: Row
    new: Row

    @property
    def ratio(self) -> float:
        """New time by old time: above 1 is slower."""
        return self.new.ours.seconds / self.old.ours.seconds

    @property
    def machine(self) -> float:
        """The same of what the device itself took for as much work: not the op's doing."""
        if self.old.floor is None or self.new.floor is None:
            return 1.0
        return self.new.floor / self.old.floor

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the middle halves of the measurements lie apart."""
        return self.new.ours.low > self.old.ours.high or self.new.ours.high < self.old.ours.low

    def is_slower(self, threshold: float) -> bool:
        """By more than the threshold, by the clock and beside the device, beyond the noise."""
        return self.is_beyond_noise and min(self.ratio, self.ratio / self.machine) > 1 + threshold

    def is_faster(self, threshold: float) -> bool:
        """Likewise."""
        most = 1 / (1 + threshold)
        return self.is_beyond_noise and max(self.ratio, self.ratio / self.machine) < most


@dataclass(frozen=True)
class Changes:
    """Two runs, row by row."""

    rows: tuple[Change, ...]
    gone: tuple[Row, ...]
    """Rows of the old run that the new one does not have."""
    threshold: float
    remark: str
    """What else is different."""

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Rows that have become slower."""
        return tuple(row for row in self.rows if row.is_slower(self.threshold))

    @property
    def improvements(self) -> tuple[Change, ...]:
        """Rows that have become faster."""
        return tuple(row for row in self.rows if row.is_faster(self.threshold))

    def __str__(self) -> str:
        """One line."""
        words = (
            f"{len(self.rows)} rows compared: {len(self.regressions)} slower and "
            f"{len(self.improvements)} faster by more than {self.threshold:.0%} and the noise"
        )
        if self.gone:
            words += f"; {len(self.gone)} rows of the old run were not measured"
        return words + self.remark

    def table(self) -> Table:
        """Those that have changed, the worst first."""
        changed = sorted(
            [*self.regressions, *self.improvements], key=lambda change: change.ratio, reverse=True
        )
        lines = tuple(
            (
                f"{c.new.op} {c.new.variant}".strip(),
                c.new.kind,
                c.new.dtype,
                f"{c.new.shape[0]} x {c.new.shape[1]}",
                c.new.direction,
                f"{duration(c.old.ours.seconds)} ({c.old.ours.spread:.1%})",
                f"{duration(c.new.ours.seconds)} ({c.new.ours.spread:.1%})",
                f"{c.ratio - 1:+.1%}",
                f"{c.machine - 1:+.1%}",
                "slower" if c.ratio > 1 else "faster",
            )
            for c in changed
        )
        headings = (
            *("op", "kind", "dtype", "shape", "direction"),
            *("old (spread)", "new (spread)", "change", "device", "verdict"),
        )
        numeric = (False,) * 5 + (True,) * 4 + (False,)
        return Table("What has changed", headings, numeric, lines, (str(self),))


def changes(old: Record, new: Record, threshold: float = THRESHOLD) -> Changes:
    """Compare the rows that two runs share."""
    before = {key(row): row for row in old.rows}
    rows = tuple(Change(before[key(row)], row) for row in new.rows if key(row) in before)
    measured = {key(row) for row in new.rows}
    gone = tuple(row for row in old.rows if key(row) not in measured)
    return Changes(rows, gone, threshold, _remark(old, new))


def _remark(old: Record, new: Record) -> str:
    def differences() -> Iterable[str]:
        for name in ("device", "driver", "torch", "cuda"):
            was, is_ = getattr(old.environment, name), getattr(new.environment, name)
            if was != is_:
                yield f"{name} was {was} and is {is_}"

    words = list(differences())
    return f"; beware: {', '.join(words)}" if words else ""
