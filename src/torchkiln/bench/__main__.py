"""Time ops, their peers and their ceiling, in turns."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from torchkiln.bench import fuzz, producers, report
from torchkiln.bench.case import named
from torchkiln.bench.clock import device_clock
from torchkiln.bench.measure import CudaGauge, Settings
from torchkiln.bench.plan import Plan, device_of
from torchkiln.bench.regression import changes
from torchkiln.bench.result import CALLS, SMALL, Measurement, Record
from torchkiln.bench.runs import DIRECTIONS, Progress, measure
from torchkiln.cli import bench_parser
from torchkiln.cli.options import STDOUT, json_lines, output_json, text_output, write_file
from torchkiln.cli.status import Status, refused
from torchkiln.patch.compiled.choice import table_of
from torchkiln.testing import SPECS
from torchkiln.testing.environment import environment
from torchkiln.testing.registry import specs_of

WHERE = "torchkiln.bench"


def plan(options: argparse.Namespace) -> Plan:
    """The choices of the command line."""
    device = device_of(WHERE, options.device)
    kinds = tuple(options.kinds or [CALLS])
    if SMALL in kinds and device.type == "cpu":
        raise ValueError(
            "torchkiln.bench: --small: got device cpu, expected a GPU, because calls are timed in "
            "CUDA graphs; type --shape 4x256 for small calls on a CPU"
        )
    if options.memory and device.type == "cpu":
        raise ValueError(
            "torchkiln.bench: --memory: got device cpu, expected a GPU, because torch counts the "
            "allocated bytes of GPUs only; leave --memory out"
        )
    gauge = CudaGauge(device) if options.memory else None
    usual = (*SPECS, *producers.SPECS) if options.ops else SPECS
    specs = specs_of(WHERE, "--specs", options.specs) if options.specs else usual
    on_cpu = options.threads or (torch.get_num_threads(),)
    return Plan(
        specs=tuple(named(options.ops, specs)),
        device=device,
        settings=Settings(device_clock(device), options.peers, gauge=gauge),
        shapes=tuple(options.shape or ()),
        dtypes=tuple(getattr(torch, name) for name in options.dtype),
        kinds=kinds,
        directions=DIRECTIONS[options.direction],
        threads=on_cpu if device.type == "cpu" else (None,),
        within=options.within,
        is_report=options.report,
    )


class Lines:
    """Progress as one line per row on the standard error."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.begun = 0

    def begin(self, words: str) -> None:
        """Count a piece that has begun."""
        del words
        self.begun += 1

    def done(self, row: Measurement) -> None:
        """Print the row."""
        print(f"[{self.begun}/{self.total}] {sentence(row)}", file=sys.stderr, flush=True)


def sentence(row: Measurement) -> str:
    """A row of the run as one line of text."""
    share = "" if row.share is None else f", {row.share:.1%} of the ceiling"
    others = "" if row.speedup is None else f", {row.speedup:.2f} x as fast as {row.best_peer}"
    noise = f", spread {row.ours.spread:.0%} !" if row.is_noisy else ""
    name = f"{row.op} {row.variant}".strip()
    time = report.duration(row.ours.seconds)
    return f"{name} {row.dtype} {row.direction}: {time}{share}{others}{noise}"


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """Show ``total`` pieces on the standard error: a bar on a terminal with rich, else lines."""
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

            def done(self, row: Measurement) -> None:
                bar.print(sentence(row), markup=False, highlight=False)

        yield Moving()


def write(options: argparse.Namespace, record: Record) -> None:
    """Write all output files, and JSON to standard output if that is chosen."""
    if options.json:
        output_json(WHERE, options.json, json_lines(record.as_dict()))
    if options.compile:
        text = json_lines(table_of(record.as_dict()))
        write_file(WHERE, "--compile", options.compile, text)
    if not options.out:
        return
    for name, text in (("json", json_lines(record.as_dict())), ("md", report.markdown(record))):
        write_file(WHERE, "--out", options.out / f"bench.{name}", text)
    if find_spec("matplotlib") is None:
        print("no pictures: there is no module matplotlib; to draw them, type", file=sys.stderr)
        print("  python -m pip install 'torchkiln[cli]'", file=sys.stderr)
        return
    from torchkiln.bench import charts  # noqa: PLC0415

    charts.write(options.out / "bench.png", record)


def read(argument: str, path: Path) -> Record:
    """The record of an earlier run."""
    try:
        return Record.read(path)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"torchkiln.bench: {argument}: got {path} ({type(error).__name__}: {error}), expected "
            "a file that --json wrote"
        ) from error


def main(given: Sequence[str] | None = None) -> int:
    """Parse the command line and run it."""
    return run(bench_parser.bench(given))


def run_fuzz(options: argparse.Namespace) -> int:
    """Time random calls; ``--out`` gets their file, which a later run continues, and a summary."""
    file = options.out and options.out / "fuzz.jsonl"
    try:
        bench_parser.require_outputs(options)
        device = device_of(WHERE, options.device)
        specs = specs_of(WHERE, "--specs", options.specs) if options.specs else SPECS
        known = named(options.ops, specs)
        if file:
            fuzz.opened(file, device)
    except (ValueError, OSError) as error:
        return refused(error)
    with text_output(options.json):
        print(environment(device))
        found = fuzz.fuzz(
            known,
            device,
            count=options.fuzz,
            seed=options.seed,
            seconds=options.within,
            file=file,
        )
        print(*found.summary(), sep="\n")
    output_json(WHERE, options.json, json_lines(found.as_dict()))
    if not found.is_whole:
        return Status.INTERRUPTED
    has_findings = found.slower or found.failed or not found.timed
    return Status.FOUND if has_findings else Status.DONE


def run(options: argparse.Namespace) -> int:
    """Measure, print, write. Regressions, or a run without rows, return the status FOUND."""
    if options.fuzz:
        return run_fuzz(options)
    try:
        bench_parser.require_outputs(options)
        old = read("--compare", options.compare) if options.compare else None
        record = read("--read", options.read) if options.read else None
        chosen = None if record else plan(options)
    except (ValueError, OSError) as error:
        return refused(error)
    whole = True
    if chosen is not None:
        if options.json != STDOUT:
            print(environment(chosen.device))
        with progress(len(chosen.pieces())) as display:
            record, whole = measure(chosen, display)
    assert record is not None
    changed = changes(old, record, options.threshold) if old else None
    unwritten = None
    try:
        # before the tables, because printing to a closed pipe ends the process
        write(options, record)
    except ValueError as error:
        unwritten = refused(error)
    with text_output(options.json):
        report.show(report.tables(record.rows))
        for line in [*report.skips(record.skipped), *record.warnings()]:
            print(line)
        if changed is not None:
            report.show([changed.table()])
    if unwritten is not None:
        return unwritten
    if not whole:
        print(f"stopped: {len(record.rows)} rows were measured, and written", file=sys.stderr)
        return Status.INTERRUPTED
    slower = changed is not None and bool(changed.regressions)
    return Status.FOUND if slower or not record.rows else Status.DONE


if __name__ == "__main__":
    sys.exit(main())
