"""A run as one HTML file: pictures and tables, nothing beside it."""

from __future__ import annotations

import io
from html import escape
from typing import TYPE_CHECKING

from torchkiln.bench.charts import charts
from torchkiln.bench.table import Table, tables

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torchkiln.bench.record import Record
    from torchkiln.bench.regression import Changes

HEADINGS = {
    "roofline": "Roofline",
    "speedups": "Speed-ups of large calls",
    "sweep": "Row lengths",
    "small": "Speed-ups of small calls",
    "host": "Host time",
}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1400px; padding: 0 1em;
       color: #222; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
td, th { padding: 2px 8px; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
td.figure, th.figure { text-align: right; }
figure { margin: 1em 0; } figure svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
"""


def html_table(table: Table) -> str:
    """A table with its title and notes."""

    def cells(words: Iterable[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=figure' if numeric else ''}>{escape(word)}</{tag}>"
            for word, numeric in zip(words, table.numeric, strict=True)
        )

    lines = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in table.rows)
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return (
        f"<p>{escape(table.title)}.</p><div class=wide><table>"
        f"<tr>{cells(table.headings, 'th')}</tr>\n{lines}</table></div>{notes}"
    )


def page(record: Record, changed: Changes | None = None) -> str:
    """The whole file."""
    where = escape(str(record.environment))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>torchkiln bench</title>",
        f"<style>{STYLE}</style><h1>torchkiln bench</h1><p>{where}</p>",
    ]
    if changed is not None:
        parts += ["<h2>What has changed</h2>", html_table(changed.table())]
    for name, figure in charts(record):
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
        svg = drawn.getvalue()
        parts += [f"<h2>{HEADINGS[name]}</h2><figure>{svg[svg.index('<svg') :]}</figure>"]
    parts += ["<h2>Tables</h2>", *map(html_table, tables(record.rows))]
    if record.skipped:
        items = "".join(f"<li>{escape(str(entry))}</li>" for entry in record.skipped)
        parts.append(f"<h2>Skipped</h2><ul>{items}</ul>")
    return "\n".join([*parts, "</html>", ""])


def write(path: Path, record: Record, changed: Changes | None = None) -> None:
    """Into a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(record, changed), encoding="utf-8")
