"""Progress and tables in the terminal: with rich where it is installed, else in plain text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from torchkiln.bench.skipped import Skipped
from torchkiln.bench.table import Table, duration, plain

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from torchkiln.bench.row import Row

WIDTH = 200
"""Of a table that goes to a file."""


class Progress(Protocol):
    """What is told while rows are measured."""

    def begin(self, words: str) -> None:
        """The next piece of work starts."""

    def done(self, entry: Row | Skipped) -> None:
        """A row is there, or will not be."""


class Lines:
    """A line for each row."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.begun = 0

    def begin(self, words: str) -> None:
        """Count; the row itself is the news."""
        del words
        self.begun += 1

    def done(self, entry: Row | Skipped) -> None:
        """Print the row."""
        print(f"[{self.begun}/{self.total}] {sentence(entry)}", file=sys.stderr, flush=True)


def sentence(row: Row | Skipped) -> str:
    """A row in words."""
    if isinstance(row, Skipped):
        return str(row)
    share = "" if row.share is None else f", {row.share:.1%} of the floor"
    others = "" if row.speedup is None else f", {row.speedup:.2f} x as fast as {row.best_peer}"
    name = f"{row.op} {row.variant}".strip()
    return f"{name} {row.dtype} {row.direction}: {duration(row.ours.seconds)}{share}{others}"


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """Follow ``total`` pieces of work on the standard error."""
    if find_spec("rich") is None or not sys.stderr.isatty():
        yield Lines(total)
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    texts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*texts, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        class Moving:
            begun = 0

            def begin(self, words: str) -> None:
                bar.update(task, description=words, completed=self.begun)
                self.begun += 1

            def done(self, entry: Row | Skipped) -> None:
                bar.print(sentence(entry), markup=False, highlight=False)

        yield Moving()


def rich_table(table: Table) -> RichTable:
    """The table as rich draws it."""
    from rich.table import Table as Drawn  # noqa: PLC0415

    drawn = Drawn(title=table.title, title_justify="left")
    for heading, numeric in zip(table.headings, table.numeric, strict=True):
        drawn.add_column(heading, justify="right" if numeric else "left")
    for cells in table.rows:
        drawn.add_row(*cells)
    return drawn


def show(tables: Iterable[Table]) -> None:
    """Print the tables on the standard output."""
    if find_spec("rich") is None:
        for table in tables:
            print(plain(table), end="\n\n")
        return
    from rich.console import Console  # noqa: PLC0415

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables:
        console.print(rich_table(table))
        for note in table.notes:
            console.print(note, soft_wrap=True, markup=False)
