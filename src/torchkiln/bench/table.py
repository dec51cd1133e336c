"""Rows as tables of words: the same ones in the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchkiln.bench.clock import Times
from torchkiln.bench.record import Record
from torchkiln.bench.row import OURS, Row

TITLES = {
    "calls": "Median time of one call (floor: what moves as many bytes, in the same turns)",
    "sweep": "Median time of one call, as many elements in rows of every length",
    "small": "Median time of one call in a CUDA graph of 128 on different tensors",
    "host": "Host time of one call, the best of 7",
}


@dataclass(frozen=True)
class Table:
    """Headings, rows of words, and which columns are figures."""

    title: str
    headings: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def duration(seconds: float) -> str:
    """Four figures and a unit."""
    if seconds < 1e-2:
        return f"{seconds * 1e6:.4g} us"
    return f"{seconds * 1e3:.4g} ms"


def size(count: int) -> str:
    """Bytes with a unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def cell(times: Times | None) -> str:
    """The time of one peer."""
    return "" if times is None else duration(times.seconds)


def in_order(names: Iterable[Iterable[str]]) -> list[str]:
    """Each name once, as they come."""
    return list(dict.fromkeys(name for group in names for name in group if name != OURS))


def columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The words of each column under its heading."""
    found = {
        "op": [f"{r.op} {r.variant}".strip() for r in rows],
        "dtype": [r.dtype for r in rows],
        "shape": [f"{r.shape[0]} x {r.shape[1]}" for r in rows],
        "direction": [r.direction for r in rows],
    }
    figures = {"threads": ["" if r.threads is None else str(r.threads) for r in rows]}
    if rows[0].kind != "host":
        figures["bytes"] = [size(r.bytes) for r in rows]
        figures["floor"] = ["" if r.floor is None else duration(r.floor) for r in rows]
    figures[OURS] = [cell(r.ours) for r in rows]
    figures["spread"] = [f"{r.ours.spread:.1%}" for r in rows]
    if rows[0].kind != "host":
        figures["of floor"] = ["" if r.share is None else f"{r.share:.1%}" for r in rows]
        figures["GB/s"] = [f"{r.rate:.4g}" for r in rows]
    for name in in_order(r.times for r in rows):
        figures[name] = [cell(r.times.get(name)) for r in rows]
    figures["faster"] = ["" if r.speedup is None else f"{r.speedup:.2f} x" for r in rows]
    for name in (OURS, *in_order(r.peaks for r in rows)):
        figures[f"{name} peak"] = [size(r.peaks[name]) if name in r.peaks else "" for r in rows]
    if rows[0].kind == "host":
        for name in in_order(r.references for r in rows):
            figures[name] = [cell(r.references.get(name)) for r in rows]
    return found | {heading: words for heading, words in figures.items() if any(words)}


def notes(rows: Iterable[Row]) -> tuple[str, ...]:
    """Which peers are missing or do something else, and why; each reason once with all its rows."""
    found: dict[str, list[str]] = {}
    for row in rows:
        words = [f"no {name}: {why}" for name, why in row.missing.items()]
        words += [f"{name}: {what}" for name, what in row.remarks.items()]
        for word in words:
            found.setdefault(word, []).append(f"{row.op} {row.direction}")
    return tuple(f"{', '.join(dict.fromkeys(who))}: {word}" for word, who in found.items())


def tables(rows: Iterable[Row]) -> list[Table]:
    """A table for each kind of rows."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    found = []
    for kind, group in by_kind.items():
        words = columns(group)
        constant = [
            heading
            for heading in ("dtype", "shape", "direction", "threads")
            if len(group) > 1 and len(set(words.get(heading, ()))) == 1
        ]
        common = [words.pop(heading)[0] for heading in constant if heading != "threads"]
        if "threads" in constant:
            common.append(f"CPU threads: {words.pop('threads')[0]}")
        title = ", ".join([TITLES[kind], *common])
        figures = tuple(heading not in ("op", "dtype", "shape", "direction") for heading in words)
        lines = tuple(zip(*words.values(), strict=True))
        found.append(Table(title, tuple(words), figures, lines, notes(group)))
    return found


def markdown(record: Record) -> str:
    """The tables as a README has them."""
    return "\n".join([f"{record.environment}", *(_markdown(t) for t in tables(record.rows))])


def _markdown(table: Table) -> str:
    rule = ["---:" if numeric else "---" for numeric in table.numeric]
    lines = [f"| {' | '.join(cells)} |" for cells in (table.headings, rule, *table.rows)]
    notes = [f"- {note}" for note in table.notes]
    return "\n".join(["", f"{table.title}.", "", *lines, *([""] if notes else []), *notes, ""])


def plain(table: Table) -> str:
    """The table in columns of characters."""
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
