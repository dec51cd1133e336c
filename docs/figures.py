"""Writes what is generated in README.md and docs/: tables of measurements, of ops, pictures.

The runs are docs/results/NAME.json, written by `torchkiln bench --json`, and NAME_fuzz.jsonl, the
fuzz_summary.jsonl of `torchkiln bench --fuzz --out`. Pages have these blocks:

    <!-- results:NAME -->           large calls of a run, and its pictures
    <!-- results:NAME add relu -->  large calls of these ops beside their peers
    <!-- headlines -->              the calls in HEADLINES, and those in LOSSES
    <!-- random:NAME -->            the slowest ten of random calls beside torch, and the counts
    <!-- models:TABLE -->           whole models, by docs/measured_models.py
    <!-- steps:TOPIC -->            the kernels of a page in docs/learn, and their times
    <!-- ops:FAMILY -->             calls, formulas and schemas of a family; ops:all the contract

A block ends with its first mark and a slash: <!-- /results:NAME -->, <!-- /headlines -->. --check
changes nothing, and fails if a page differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import learn_steps
import measured_models
import op_reference

from torchkiln.bench import Measurement, Record
from torchkiln.bench.fuzz import Summary
from torchkiln.bench.report import duration, size, skips

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"<!-- (?P<kind>results|ops|steps|models|headlines|random)"
    r"(?::(?P<name>\w+))?(?P<ops>(?: \w+)*) -->\n"
    r"(?:.*?)(?P<end><!-- /(?P=kind)(?::(?P=name))? -->)",
    re.DOTALL,
)
PICTURES = ("speedups", "share", "roofline", "sweep", "rows", "host")

Call = tuple[str, str, str, int, int, str, str]
"""Run, op, variant, rows, columns, dtype and direction."""

HEADLINES: tuple[Call, ...] = (
    ("h100_rows", "layer_norm", "", 32768, 4096, "bfloat16", "backward"),
    ("h100_rows", "add_layer_norm", "", 16384, 8192, "bfloat16", "backward"),
    ("h100_rows", "softmax", "", 8192, 131072, "bfloat16", "backward"),
    ("h100_rows", "cross_entropy", "", 8192, 131072, "bfloat16", "forward"),
    ("h100_layers", "group_norm", "channels_last", 262144, 320, "bfloat16", "backward"),
)
LOSSES: tuple[Call, ...] = (
    ("h100_layers", "bn_act", "", 200704, 64, "float32", "forward"),
    ("h100", "relu", "", 16384, 8192, "bfloat16", "backward"),
    ("h100_rows", "rms_norm", "float32 weight", 16384, 8192, "bfloat16", "backward"),
)


def read(path: Path) -> Record:
    """A run, without its commit: the pages name the file, which has the commit."""
    record = Record.read(path)
    return dataclasses.replace(
        record, environment=dataclasses.replace(record.environment, commit=None)
    )


def cell(row: Measurement | None) -> str:
    """Time, spread, share of the ceiling, and speed-up over the best peer."""
    if row is None:
        return ""
    words = [f"{duration(row.ours.seconds)} ± {row.ours.spread / 2:.1%}"]
    if row.share is not None:
        words.append(f"{row.share:.0%}")
    if row.speedup is not None:
        words.append(f"{row.speedup:.2f} x {row.best_peer}")
    return ", ".join(words)


def calls(rows: Sequence[Measurement]) -> Iterable[str]:
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


def block(name: str, record: Record, folder: Path) -> str:
    """All large calls of a run, with its pictures."""
    lines = [
        f"{record.environment}. Source: `docs/results/{name}.json`.",
        "",
        *calls([row for row in record.rows if row.kind == "calls"]),
    ]
    pictures = [p for p in PICTURES if (folder / f"{name}-{p}.png").is_file()]
    lines += ["", *(f"![{p}]({folder.name}/{name}-{p}.png)" for p in pictures)] if pictures else []
    if record.skipped:
        lines += ["", *(f"- {line}" for line in skips(record.skipped))]
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
        "| | least to move | ceiling | " + " | ".join(who) + " |",
        "|---|---:|---:|" + "---:|" * len(who),
    ]
    for row in rows:
        ceiling = "" if row.ceiling is None else duration(row.ceiling)
        cells = [duration(row.times[name].seconds) if name in row.times else "" for name in who]
        name = f"`{row.op}` {row.direction} {row.shape[0]} x {row.shape[1]}"
        lines.append(f"| {name} | {size(row.bytes)} | {ceiling} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def headlines(files: dict[str, Path]) -> str:
    """The calls of HEADLINES and LOSSES beside their fastest peer."""
    records = {name: read(path) for name, path in files.items()}
    lines = ["| | call | time | ceiling | beside the fastest peer |", "|---|---|---:|---:|---|"]
    for words, chosen in (("faster", HEADLINES), ("slower", LOSSES)):
        for run, op, variant, rows, columns, dtype, direction in chosen:
            key = (op, variant, (rows, columns), dtype, direction)
            row = next(
                r
                for r in records[run].rows
                if r.kind == "calls" and (r.op, r.variant, r.shape, r.dtype, r.direction) == key
            )
            if row.share is None or row.speedup is None:
                raise SystemExit(f"the run {run} has no ceiling or no peer of {key}")
            call = f"`{op}` {direction}, {rows} x {columns}, {dtype}{variant and f', {variant}'}"
            lines.append(
                f"| {words} | {call} | {duration(row.ours.seconds)} | {row.share:.0%} | "
                f"{row.speedup:.2f} x {row.best_peer} |"
            )
    return "\n".join([*lines, ""])


def random_calls(path: Path, count: int = 10) -> str:
    """The random calls that lose most to eager torch, and how many do."""
    run = Summary.read(path)
    machine, total = run.environment, run.total
    share = f"{total.slower:,} ({total.slower / total.calls:.1%})"
    lines = [
        f"{machine['device']}, torch {machine['torch']}, [{path.name}](results/{path.name}):",
        f"{share} of {total.calls:,} calls take over 5 % and 1 us longer than in eager torch.",
        f"Half of the calls are at least {total.median:.2f} times as fast as there.",
        "",
        "| times as fast | ours | torch | direction | call |",
        "|---:|---:|---:|---|---|",
    ]
    for one in run.slower[:count]:
        ours, theirs = min(one.pairs, key=lambda pair: pair[1] / pair[0])
        cells = f"{one.speedup:.2f}", duration(ours), duration(theirs), one.direction
        lines.append(f"| {' | '.join(cells)} | `{one.call}` |")
    return "\n".join([*lines, ""])


def written(page: str, files: dict[str, Path]) -> str:
    """The page with new tables."""

    def replace(match: re.Match[str]) -> str:
        name, ops = match["name"], match["ops"].split()
        if match["kind"] == "ops":
            text = op_reference.block(name)
        elif match["kind"] == "steps":
            text = learn_steps.table(name, learn_steps.measured())
        elif match["kind"] == "models":
            text = measured_models.table(name)
        elif match["kind"] == "headlines":
            text = headlines(files)
        elif match["kind"] == "random":
            results = next(iter(files.values())).parent
            text = random_calls(results / f"{name}_fuzz.jsonl")
        elif ops:
            text = beside(read(files[name]), ops)
        else:
            text = block(name, read(files[name]), files[name].parent)
        begin = match[0].partition("\n")[0]
        return f"{begin}\n{text}{match['end']}"

    return BLOCK.sub(replace, page)


def require_all(page: str, expected: Iterable[str]) -> None:
    """Refuse a page without a block for each run, or with another block."""
    names = {m["name"] for m in BLOCK.finditer(page) if m["kind"] == "results" and not m["ops"]}
    if names != set(expected):
        raise SystemExit(
            f"got the blocks {sorted(names)}, expected {sorted(expected)}: "
            "a block <!-- results:NAME --> for each docs/results/NAME.json"
        )


def in_few_bars(rows: Sequence[Measurement]) -> list[Measurement]:
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
        record = read(path)
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
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    options = parser.parse_args(given)
    docs = options.root / "docs"
    files = {path.stem: path for path in sorted((docs / "results").glob("*.json"))}
    require_all((docs / "performance.md").read_text(encoding="utf-8"), files)
    if not options.check:
        draw(docs / "results")
    generated = {docs / "results" / "h200_fp8-llama.svg": measured_models.picture()}
    for page in [options.root / "README.md", *sorted(docs.rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        whole = op_reference.with_all_families(text) if page.name == "ops.md" else text
        generated[page] = written(whole, files)
    differs = 0
    for path, text in generated.items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if options.check:
            differs = 1
            print(
                f"{path.name} differs from what is generated: type nox -s figures", file=sys.stderr
            )
        else:
            path.write_text(text, encoding="utf-8")
    return differs


if __name__ == "__main__":
    sys.exit(main())
