"""Changes between two runs that are larger than their noise."""

from __future__ import annotations

from dataclasses import dataclass

from torchkiln.bench.report import Table, duration
from torchkiln.bench.result import Measurement, Record

Key = tuple[object, ...]

THRESHOLD = 0.05
"""Smallest relative change that counts as slower or faster."""


def key(row: Measurement) -> Key:
    """The fields that rows of two runs must share to be compared."""
    return row.kind, row.op, row.variant, row.dtype, row.shape, row.direction, row.threads


@dataclass(frozen=True)
class Change:
    """The rows of one call in both runs."""

    old: Measurement
    new: Measurement

    @property
    def ratio(self) -> float:
        """New time divided by old time: above 1 is slower."""
        return self.new.ours.seconds / self.old.ours.seconds

    @property
    def machine(self) -> float:
        """New ceiling divided by old ceiling: a change of the device, not of the op."""
        if self.old.ceiling is None or self.new.ceiling is None:
            return 1.0
        return self.new.ceiling / self.old.ceiling

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the interquartile ranges of the measurements do not overlap."""
        return self.new.ours.low > self.old.ours.high or self.new.ours.high < self.old.ours.low

    def is_slower(self, threshold: float) -> bool:
        """Whether the time, also relative to the ceiling, rose by more than the threshold."""
        return self.is_beyond_noise and min(self.ratio, self.ratio / self.machine) > 1 + threshold

    def is_faster(self, threshold: float) -> bool:
        """Whether the time, also relative to the ceiling, fell by more than the threshold."""
        most = 1 / (1 + threshold)
        return self.is_beyond_noise and max(self.ratio, self.ratio / self.machine) < most


@dataclass(frozen=True)
class Changes:
    """The comparison of two runs, row by row."""

    rows: tuple[Change, ...]
    gone: tuple[Measurement, ...]
    """Rows of the old run that the new run does not have."""
    threshold: float
    remark: str
    """Other differences of the two runs, such as the device."""

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Rows that have become slower."""
        return tuple(row for row in self.rows if row.is_slower(self.threshold))

    @property
    def improvements(self) -> tuple[Change, ...]:
        """Rows that have become faster."""
        return tuple(row for row in self.rows if row.is_faster(self.threshold))

    def __str__(self) -> str:
        """A summary in one line."""
        words = (
            f"{len(self.rows)} rows compared: {len(self.regressions)} slower and "
            f"{len(self.improvements)} faster by more than {self.threshold:.0%} and the noise"
        )
        if self.gone:
            words += f"; {len(self.gone)} rows of the old run were not measured"
        return words + self.remark

    def table(self) -> Table:
        """The changed rows, slowest first."""
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
        return Table("Changes since the old run", headings, numeric, lines, (str(self),))


def changes(old: Record, new: Record, threshold: float = THRESHOLD) -> Changes:
    """Compare the rows that two runs share."""
    before = {key(row): row for row in old.rows}
    rows = tuple(Change(before[key(row)], row) for row in new.rows if key(row) in before)
    measured = {key(row) for row in new.rows}
    gone = tuple(row for row in old.rows if key(row) not in measured)
    was, now = old.environment, new.environment
    different = [
        f"{name} was {getattr(was, name)} and is {getattr(now, name)}"
        for name in ("device", "driver", "torch", "cuda")
        if getattr(was, name) != getattr(now, name)
    ]
    remark = f"; beware: {', '.join(different)}" if different else ""
    return Changes(rows, gone, threshold, remark)
