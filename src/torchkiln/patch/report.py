"""The report of ``torchkiln.replace``: the outcome for each module, and ``undo()``."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from types import ModuleType
from typing import Any, ClassVar, Literal

from torch import nn

from torchkiln import _report

HEAD = ("modules", "was", "now", "same", "error from float64", "us was -> now", "outcome")


@dataclass
class Replacement:
    """The outcome for one module or function: a row of the report."""

    name: str
    """The path in the model, ``loss_function``, or the name in a Python module."""
    was: str
    """The original class or function."""
    kind: str = ""
    now: str = ""
    """The call of the new forward; empty if there is none."""
    outcome: Literal["replaced", "would replace", "kept"] = "kept"
    reason: str = ""
    """The reason to keep the module's forward, or to keep the precision of a replaced module."""
    bitwise: bool | None = None
    """Whether both results are bitwise equal in the module's dtype; None if not compared."""
    dtype: str = ""
    """The dtype of the comparison."""
    error_was: float | None = None
    """Root mean square error of the original, relative to the result in float64."""
    error_now: float | None = None
    seconds_was: float | None = None
    seconds_now: float | None = None

    @property
    def changed(self) -> bool:
        """Whether the module was replaced, or would be."""
        return self.outcome != "kept"

    @property
    def error_ratio(self) -> float | None:
        """New error divided by old error; None if not compared, or if the old error is 0."""
        if self.error_now is None or not self.error_was:
            return None
        return self.error_now / self.error_was

    def as_dict(self) -> dict[str, Any]:
        """The row in JSON types."""
        return {**asdict(self), "error_ratio": self.error_ratio}


def comparison(row: Replacement) -> str:
    """The comparison of the old and the new forward, as text."""
    if row.bitwise is None:
        return ""
    if row.bitwise:
        return f"bitwise in {row.dtype}"
    ratio = row.error_ratio
    if ratio is None or ratio == 1:
        return "other rounding"
    return "closer to float64" if ratio < 1 else f"{ratio:.2f} x the error"


def verdict(row: Replacement) -> str:
    """The outcome, with the reason to leave the module, or its precision, unchanged."""
    return f"{row.outcome}: {row.reason}" if row.reason or not row.changed else row.outcome


def cells(rows: list[Replacement]) -> tuple[str, ...]:
    """The cells of one line for rows with equal texts: the largest error, the sum of times."""
    worst = max(rows, key=lambda row: row.error_now or 0.0)
    errors = times = ""
    if worst.error_was is not None and worst.error_now is not None:
        errors = f"{worst.error_was:.1e} -> {worst.error_now:.1e}"
    if worst.seconds_was is not None:
        was = sum(row.seconds_was or 0.0 for row in rows)
        now = sum(row.seconds_now or 0.0 for row in rows)
        times = f"{was * 1e6:.0f} -> {now * 1e6:.0f}"
    same = comparison(worst)
    return (str(len(rows)), worst.was, worst.now or "-", same, errors, times, verdict(worst))


class Report(_report.Report, Mapping[str, Replacement]):
    """The outcome for each module by its name, in the order of the model.

    ``report["layers.0.norm"]`` is the row of a module, ``report.rows`` has all rows. ``print``
    groups equal rows. ``report.model`` is the model, so that ``replace(model).model`` can be
    passed on. With ``example``, ``seconds_was`` and ``seconds_now`` are the times of the model.
    """

    schema: ClassVar[str] = "torchkiln.replace/1"

    def __init__(
        self,
        maker: str,
        model: nn.Module | ModuleType,
        rows: list[Replacement],
        undo: list[Callable[[], None]],
        *,
        dry_run: bool = False,
        seconds: Sequence[float] = (),
    ) -> None:
        if dry_run:
            for row in filter(lambda row: row.changed, rows):
                row.outcome = "would replace"
        self._maker = maker
        self._undo = undo
        self._things = "functions" if isinstance(model, ModuleType) else HEAD[0]
        self.model: Any = model
        self.rows = tuple(rows)
        self._by_name = {row.name: row for row in rows}
        self.dry_run = dry_run
        self.seconds_was = seconds[0] if seconds else None
        self.seconds_now = seconds[1] if seconds else None

    def undo(self) -> None:
        """Give every module its class back; parameters and buffers stay as they are.

        Raises:
            RuntimeError: something else has changed the class of a module since.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def __getitem__(self, name: str) -> Replacement:
        if name not in self._by_name:
            raise KeyError(f"{self._maker}: report: got {name!r}, expected the name of a module")
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def changed(self) -> tuple[Replacement, ...]:
        """The rows of the modules that were replaced, or would be in a dry run."""
        return tuple(row for row in self.rows if row.changed)

    def as_dict(self) -> dict[str, Any]:
        """All rows in JSON types."""
        rows = [row.as_dict() for row in self.rows]
        times = {"seconds_was": self.seconds_was, "seconds_now": self.seconds_now}
        return {"schema": self.schema, "dry_run": self.dry_run, **times, "rows": rows}

    def _table(self) -> list[tuple[str, ...]]:
        """The cells of the groups of equal rows, after a line of column names; no empty columns.

        Replaced modules come first.
        """
        groups: dict[tuple[str, str, str], list[Replacement]] = {}
        for row in sorted(self.rows, key=lambda row: not row.changed):
            groups.setdefault((row.was, row.now, verdict(row)), []).append(row)
        lines = [(self._things, *HEAD[1:]), *map(cells, groups.values())]
        used = [any(column[1:]) for column in zip(*lines, strict=True)]
        return [tuple(compress(line, used)) for line in lines]

    def _summary(self) -> str:
        done = "to replace (dry run)" if self.dry_run else "replaced"
        times = ""
        if self.seconds_was is not None and self.seconds_now is not None:
            times = f"; model: {self.seconds_was * 1e3:.4g} -> {self.seconds_now * 1e3:.4g} ms"
        undo = "; undo() of the report takes them back" if self.changed and not self.dry_run else ""
        return f"{len(self.changed)} of {len(self)} {self._things} {done}{times}{undo}"

    def __str__(self) -> str:
        lines = self._table()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(map(str.ljust, line, widths)).rstrip()  # cells of a column are equally wide
            for line in lines
        ]
        return "\n".join([*table, self._summary()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        head, *lines = [[html.escape(cell) for cell in line] for line in self._table()]
        rows = ["".join(f"<th>{cell}</th>" for cell in head)]
        rows += ["".join(f"<td>{cell}</td>" for cell in line) for line in lines]
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table>{table}</table><p>{self._summary()}</p>"
