"""What ``torchkiln.replace`` did to each module, and the way back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import compress

HEAD = ("modules", "was", "now", "same", "error was -> now", "us was -> now", "verdict")


@dataclass
class Row:
    """The outcome for one module."""

    name: str
    """The path in the model, or ``loss_function``."""
    was: str
    """The class."""
    kind: str = ""
    now: str = ""
    """The call of the new forward; empty if there is none."""
    replaced: bool = False
    why: str = ""
    """The reason to leave the module alone."""
    same: str = ""
    """How the results of both forwards compare."""
    error_was: float | None = None
    """Relative to float64, root mean square."""
    error_now: float | None = None
    us_was: float | None = None
    us_now: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the module was replaced, and the reason if not."""
        return "replaced" if self.replaced else f"left alone: {self.why}"


def cells(rows: list[Row]) -> tuple[str, ...]:
    """The printed line of equal rows: largest error, sum of times."""
    worst = max(rows, key=lambda row: row.error_now or 0.0)
    errors = times = ""
    if worst.error_was is not None and worst.error_now is not None:
        errors = f"{worst.error_was:.1e} -> {worst.error_now:.1e}"
    if worst.us_was is not None:
        was, now = (sum(getattr(row, name) or 0.0 for row in rows) for name in ("us_was", "us_now"))
        times = f"{was:.0f} -> {now:.0f}"
    return (str(len(rows)), worst.was, worst.now or "-", worst.same, errors, times, worst.verdict)


class Report:
    """The rows of all modules, in the order of the model; ``print`` shows them in groups.

    ``report["layers.0.norm"]`` is the row of a module. Errors begin with ``maker``, the function
    that made the report.
    """

    def __init__(self, maker: str, rows: list[Row], *, dry_run: bool = False) -> None:
        self.maker = maker
        self.rows = rows
        self.dry_run = dry_run
        self._undo: list[Callable[[], None]] = []

    def on_undo(self, step: Callable[[], None]) -> None:
        """Add a step of the way back."""
        self._undo.append(step)

    def undo(self) -> None:
        """Give every module its class back; parameters and buffers stay as they are.

        Raises:
            RuntimeError: something else has changed the class of a module since.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{self.maker}: report: got {name!r}, expected the name of a module")

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def replaced(self) -> list[Row]:
        """The rows of the modules that were replaced."""
        return [row for row in self.rows if row.replaced]

    def json(self) -> str:
        """All rows as JSON."""
        return json.dumps({"dry_run": self.dry_run, "rows": [asdict(row) for row in self.rows]})

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: not row.replaced):
            groups.setdefault((row.was, row.now, row.verdict), []).append(row)
        lines = [HEAD, *map(cells, groups.values())]
        used = [any(column[1:]) for column in zip(*lines, strict=True)]
        lines = [tuple(compress(line, used)) for line in lines]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(map(str.ljust, line, widths)).rstrip()  # cells of a column are equally wide
            for line in lines
        ]
        done = "to replace (dry run)" if self.dry_run else "replaced"
        return "\n".join([*table, f"{len(self.replaced)} of {len(self)} modules {done}"])
