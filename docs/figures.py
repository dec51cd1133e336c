"""Writes the tables and pictures of README.md and docs/ that come from runs of the benchmark.

The runs are results/NAME.json, written by `torchkiln bench --json`. Their tables stand between
<!-- results:NAME --> and <!-- /results:NAME -->. With ops, <!-- results:NAME add relu --> holds a
table of these ops beside their peers. --check changes nothing, and fails if a page differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchkiln.bench import Record, Row
from torchkiln.bench.report import duration, size

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"<!-- results:(?P<name>\w+)(?P<ops>(?: \w+)*) -->\n(.*?)<!-- /results:(?P=name) -->", re.DOTALL
)
PICTURES = ("share", "speedups", "roofline", "sweep", "host")


def cell(row: Row | None) -> str:
    """Time, spread, share of the floor, and speed-up over the best peer."""
    if row is None:
        return ""
    words = [f"{duration(row.ours.seconds)} ± {row.ours.spread / 2:.1%}"]
    if row.share is not None:
        words.append(f"{row.share:.0%}")
    if row.speedup is not None:
        words.append(f"{row.speedup:.2f} x {row.best_peer}")
    return ", ".join(words)


def calls(rows: Sequence[Row]) -> Iterable[str]:
    """A line for each op and shape, a column for each dtype and direction."""
    columns = list(dict.fromkeys((row.dtype, row.direction) for row in rows))
    found = {(r.op, r.variant, r.shape, r.dtype, r.direction): r for r in rows}
    lines = list(dict.fromkeys((r.op, r.variant, r.shape) for r in rows))
    yield "| | " + " | ".join(" ".join(column) for column in columns) + " |"
    yield "|---|" + "---|" * len(columns)
    for op, variant, shape in lines:
        cells = [cell(found.get((op, variant, shape, *column))) for column in columns]
        name = f"`{op}` {variant}".strip()
        yield f"| {name} {shape[0]} x {shape[1]} | " + " | ".join(cells) + " |"


def host(rows: Sequence[Row]) -> Iterable[str]:
    """Host times in microseconds, ours and the peers'."""
    who = list(dict.fromkeys(name for row in rows for name in row.times))
    beside = list(dict.fromkeys(name for row in rows for name in row.references))
    yield "| host time of one call, us | " + " | ".join([*who, *beside]) + " |"
    yield "|---|" + "---:|" * len([*who, *beside])
    for row in rows:
        times = {**row.references, **row.times}
        cells = [f"{times[n].seconds * 1e6:.1f}" if n in times else "" for n in [*who, *beside]]
        yield f"| `{row.op}` {row.dtype} {row.direction} | " + " | ".join(cells) + " |"


def block(name: str, record: Record, folder: Path) -> str:
    """All large calls and host times of a run, with its pictures."""
    lines = [
        f"{record.environment}. Each cell: the median time of a call, half of the middle half of",
        "its measurements, the share of the speed at which a copy moves as many bytes, how many",
        "times as fast as the best peer, and which that is.",
        "",
        *calls([row for row in record.rows if row.kind == "calls"]),
    ]
    times = [row for row in record.rows if row.kind == "host"]
    if times:
        lines += ["", "<details><summary>Host times</summary>", "", *host(times), "", "</details>"]
    pictures = [p for p in PICTURES if (folder / f"{name}-{p}.png").is_file()]
    lines += ["", *(f"![{p}]({folder.name}/{name}-{p}.png)" for p in pictures)] if pictures else []
    if record.skipped:
        lines += ["", *(f"- {entry}" for entry in record.skipped)]
    return "\n".join([*lines, ""])


def beside(record: Record, ops: Sequence[str]) -> str:
    """Large calls of some ops in the last dtype: ours, the peers', and a copy."""
    rows = [row for row in in_few_bars(record.rows) if row.op in ops]
    if missing := set(ops) - {row.op for row in rows}:
        raise SystemExit(f"the results have no calls of {', '.join(sorted(missing))}")
    rows.sort(key=lambda row: ops.index(row.op))
    who = list(dict.fromkeys(name for row in rows for name in row.times))
    lines = [
        f"{record.environment}; {rows[0].dtype}. Median times of a call.",
        "",
        "| | least to move | moving as much | " + " | ".join(who) + " |",
        "|---|---:|---:|" + "---:|" * len(who),
    ]
    for row in rows:
        floor = "" if row.floor is None else duration(row.floor)
        cells = [duration(row.times[name].seconds) if name in row.times else "" for name in who]
        name = f"`{row.op}` {row.direction} {row.shape[0]} x {row.shape[1]}"
        lines.append(f"| {name} | {size(row.bytes)} | {floor} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def written(page: str, files: dict[str, Path]) -> str:
    """The page with new tables."""

    def replace(match: re.Match[str]) -> str:
        name, ops = match["name"], match["ops"].split()
        path = files[name]
        record = Record.read(path)
        text = beside(record, ops) if ops else block(name, record, path.parent)
        begin = " ".join([name, *ops])
        return f"<!-- results:{begin} -->\n{text}<!-- /results:{name} -->"

    return BLOCK.sub(replace, page)


def require_all(readme: str, files: dict[str, Path]) -> None:
    """Refuse a README without a block for each file, or with another block."""
    names = {match["name"] for match in BLOCK.finditer(readme)}
    if names != files.keys():
        raise SystemExit(
            f"README.md has the blocks {sorted(names)} and the folder of results the files "
            f"{sorted(files)}: expected a block <!-- results:NAME --> for each NAME.json"
        )


def in_few_bars(rows: Sequence[Row]) -> list[Row]:
    """Large calls for a picture: one shape of each op, in the last dtype."""
    calls = [row for row in rows if row.kind == "calls" and not row.variant]
    first: dict[str, tuple[int, int]] = {}
    return [
        row
        for row in calls
        if row.dtype == calls[-1].dtype and first.setdefault(row.op, row.shape) == row.shape
    ]


def draw(results: Path) -> None:
    """Replace the pictures of every file, beside it."""
    from torchkiln.bench.bars import DPI  # noqa: PLC0415
    from torchkiln.bench.charts import charts  # noqa: PLC0415

    for path in results.glob("*.json"):
        record = Record.read(path)
        for old in results.glob(f"{path.stem}-*.png"):
            old.unlink()
        few = dataclasses.replace(record, rows=tuple(in_few_bars(record.rows)))
        figures = dict(charts(record))
        figures |= {n: figure for n, figure in charts(few) if n in ("share", "speedups")}
        for name, figure in figures.items():
            figure.savefig(path.with_name(f"{path.stem}-{name}.png"), dpi=DPI)


def main(given: Sequence[str] | None = None) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where it differs")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    options = parser.parse_args(given)
    if not options.check:
        draw(options.results)
    files = {path.stem: path for path in options.results.glob("*.json")}
    require_all(options.readme.read_text(encoding="utf-8"), files)
    differs = 0
    for page in [options.readme, *sorted((options.readme.parent / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        expected = written(text, files)
        if expected == text:
            continue
        if options.check:
            differs = 1
            print(f"{page.name} differs from results/: type nox -s figures", file=sys.stderr)
        else:
            page.write_text(expected, encoding="utf-8")
    return differs


if __name__ == "__main__":
    sys.exit(main())
