"""Tables of a run, for the terminal and in Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from torchkiln.bench.result import HOST, OURS, Measurement, Record, Skipped

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from torchkiln.bench.clock import Times

TITLES = {
    "calls": "Median time of one call (ceiling: a copy of as many bytes, measured in turns)",
    "sweep": "Median time of one call, as many elements in rows of every length",
    "rows": "Median time of one call on 1 to 1 M rows",
    "small": "Median time of one call in a CUDA graph of 128 on different tensors",
    "host": "Host time of one call, the best of 7",
}
WIDTH = 200
"""Characters of a table that goes to a file."""


@dataclass(frozen=True)
class Table:
    """Title, headings and rows of a table; ``numeric`` marks columns of figures."""

    title: str
    headings: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def duration(seconds: float) -> str:
    """Seconds with four significant digits and a unit: ``12.35 us``."""
    if seconds < 1e-2:
        return f"{seconds * 1e6:.4g} us"
    return f"{seconds * 1e3:.4g} ms"


def size(count: int) -> str:
    """A number of bytes as text, with a unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def tables(rows: Iterable[Measurement]) -> list[Table]:
    """A table for each kind of row."""
    by_kind: dict[str, list[Measurement]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    found = []
    for kind, group in by_kind.items():
        words = columns(group)
        title = [TITLES[kind]]
        for heading in ("dtype", "shape", "direction", "threads"):
            if len(group) > 1 and len(set(words.get(heading, ()))) == 1:
                value = words.pop(heading)[0]
                title.append(f"CPU threads: {value}" if heading == "threads" else value)
        figures = tuple(heading not in ("op", "dtype", "shape", "direction") for heading in words)
        lines = tuple(zip(*words.values(), strict=True))
        found.append(Table(", ".join(title), tuple(words), figures, lines, notes(group)))
    return found


def columns(rows: Sequence[Measurement]) -> dict[str, list[str]]:
    """The texts of each column under its heading; empty columns are left out."""

    def cell(times: Times | None) -> str:
        return "" if times is None else duration(times.seconds)

    def names(groups: Iterable[Iterable[str]]) -> list[str]:
        return list(dict.fromkeys(name for group in groups for name in group if name != OURS))

    on_device = rows[0].kind != HOST
    found = {
        "op": [f"{r.op} {r.variant}".strip() for r in rows],
        "dtype": [r.dtype for r in rows],
        "shape": [f"{r.shape[0]} x {r.shape[1]}" for r in rows],
        "direction": [r.direction for r in rows],
        "threads": ["" if r.threads is None else str(r.threads) for r in rows],
    }
    if on_device:
        found["bytes"] = [size(r.bytes) for r in rows]
        found["ceiling"] = ["" if r.ceiling is None else duration(r.ceiling) for r in rows]
    found[OURS] = [cell(r.ours) for r in rows]
    found["spread"] = [f"{'! ' if r.is_noisy else ''}{r.ours.spread:.1%}" for r in rows]
    if on_device:
        found["of ceiling"] = ["" if r.share is None else f"{r.share:.1%}" for r in rows]
        found["GB/s"] = [f"{r.rate:.4g}" for r in rows]
    for name in names(r.times for r in rows):
        found[name] = [cell(r.times.get(name)) for r in rows]
    found["faster"] = ["" if r.speedup is None else f"{r.speedup:.2f} x" for r in rows]
    for name in (OURS, *names(r.peaks for r in rows)):
        found[f"{name} peak"] = [size(r.peaks[name]) if name in r.peaks else "" for r in rows]
    if not on_device:
        for name in names(r.references for r in rows):
            found[name] = [cell(r.references.get(name)) for r in rows]
    return {heading: words for heading, words in found.items() if any(words)}


def notes(rows: Iterable[Measurement]) -> tuple[str, ...]:
    """Peers that are missing or do something else; each reason once, with all its rows."""
    found: dict[str, list[str]] = {}
    for row in rows:
        words = [f"no {name}: {why}" for name, why in row.missing.items()]
        words += [f"{name}: {what}" for name, what in row.remarks.items()]
        for word in words:
            found.setdefault(word, []).append(f"{row.op} {row.direction}")
    return tuple(f"{', '.join(dict.fromkeys(who))}: {word}" for word, who in found.items())


def skips(skipped: Iterable[Skipped]) -> list[str]:
    """A line for each reason, with all calls that were skipped for it."""
    found: dict[str, list[str]] = {}
    for entry in skipped:
        found.setdefault(entry.reason, []).append(entry.call)
    return [f"skipped {', '.join(calls)}: {reason}" for reason, calls in found.items()]


def plain(table: Table) -> str:
    """The table as plain text: title, aligned columns and notes."""
    everything = [table.headings, *table.rows]
    widths = [max(map(len, column)) for column in zip(*everything, strict=True)]
    lines = [
        "  ".join(
            word.rjust(width) if numeric else word.ljust(width)
            for word, width, numeric in zip(cells, widths, table.numeric, strict=True)
        ).rstrip()
        for cells in everything
    ]
    return "\n".join([f"{table.title}:", *lines, *table.notes])


def rich_table(table: Table) -> RichTable:
    """The table for rich's console, without the title, which rich would wrap."""
    from rich.table import Table as Drawn  # noqa: PLC0415

    drawn = Drawn()
    for heading, numeric in zip(table.headings, table.numeric, strict=True):
        drawn.add_column(heading, justify="right" if numeric else "left")
    for cells in table.rows:
        drawn.add_row(*cells)
    return drawn


def show(tables: Iterable[Table]) -> None:
    """Print tables on the standard output, with rich if installed; empty tables print notes."""
    if find_spec("rich") is None:
        for table in tables:
            print(plain(table) if table.rows else "\n".join(table.notes), end="\n\n")
        return
    from rich.console import Console  # noqa: PLC0415

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables:
        if table.rows:
            console.print(f"{table.title}:", soft_wrap=True, markup=False, highlight=False)
            console.print(rich_table(table))
        for note in table.notes:
            console.print(note, soft_wrap=True, markup=False)


def markdown(record: Record) -> str:
    """The environment, warnings and tables in Markdown."""
    parts = [str(record.environment), *(f"\n{words}." for words in record.warnings())]
    for table in tables(record.rows):
        rule = ["---:" if numeric else "---" for numeric in table.numeric]
        lines = [f"| {' | '.join(cells)} |" for cells in (table.headings, rule, *table.rows)]
        items = [f"- {note}" for note in table.notes]
        below = ["", *items] if items else []
        parts += ["", f"{table.title}.", "", *lines, *below, ""]
    return "\n".join(parts)
