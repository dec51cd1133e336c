"""Time ops beside their peers and beside what the device can do at most."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from torchkiln.bench import csvfile, terminal
from torchkiln.bench.bench_case import BACKWARD, FORWARD, named
from torchkiln.bench.clock import device_clock
from torchkiln.bench.measure import Settings
from torchkiln.bench.memory import CudaGauge
from torchkiln.bench.options import counts, device_of, dtypes, minutes, peers, percent
from torchkiln.bench.peers import PEERS
from torchkiln.bench.plan import CALLS, DTYPES, HOST, SMALL, SWEEP, Plan
from torchkiln.bench.record import Record
from torchkiln.bench.regression import THRESHOLD, Changes, changes
from torchkiln.bench.row import Row
from torchkiln.bench.skipped import Skipped
from torchkiln.bench.table import markdown, tables
from torchkiln.cli.options import shape
from torchkiln.testing import SPECS
from torchkiln.testing.environment import Environment, environment
from torchkiln.testing.registry import specs_of

REPORT_SECONDS = 8 * 60
REPORT_KINDS = (HOST, CALLS, SWEEP)
FORMS = ("json", "csv", "markdown", "html", "plot")
SUFFIXES = {"markdown": "md", "plot": "png"}


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="torchkiln bench", description=__doc__)
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help="names of ops (default: all)")
    add("--specs", metavar="MODULE", help="take the ops of SPECS in a module or a .py file")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    add("--dtype", type=dtypes, default=DTYPES, help="default: float32,bfloat16")
    add(
        "--shape",
        type=shape,
        action="append",
        metavar="RxC",
        help="rows and columns; repeatable (default: chosen for each op)",
    )
    add("--peers", type=peers, default=PEERS, help=f"default: {','.join(PEERS)}, where installed")
    add("--threads", type=counts, help="of the CPU, such as 1,2 (default: torch's number)")
    direction = parser.add_argument_group("direction (default: both)")
    for name in (FORWARD, BACKWARD):
        direction.add_argument(f"--{name}", dest="directions", action="append_const", const=name)
    kinds = parser.add_argument_group("what is timed (default: --calls)")
    for name, words in (
        (CALLS, "single calls on large tensors"),
        (SWEEP, "single calls on as many elements in rows of 256 ... 151936"),
        (SMALL, "calls on 1 K ... 1 M elements, or on few rows, in CUDA graphs"),
        (HOST, "how long calls on 4 x 64 elements keep the host, with and without gradients"),
    ):
        kinds.add_argument(f"--{name}", dest="kinds", action="append_const", const=name, help=words)
    add("--memory", action="store_true", help="peaks of large calls, too (GPU)")
    add("--within", type=minutes, metavar="MINUTES", help="be done by then")
    add(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="the whole, within 8 minutes: large calls, host times, row lengths, in every form",
    )
    outputs = parser.add_argument_group("what is written")
    for name, words in (
        ("json", "all rows"),
        ("csv", "a line for each time"),
        ("markdown", "the tables"),
        ("html", "pictures and tables"),
        ("plot", "the pictures, each into FILE-<its name>.png"),
    ):
        outputs.add_argument(f"--{name}", type=Path, metavar="FILE", help=words)
    before = parser.add_argument_group("other runs")
    before.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="print what has changed; 1 if slower"
    )
    before.add_argument(
        "--threshold", type=percent, default=THRESHOLD, metavar="%", help="default: 5 %%"
    )
    before.add_argument(
        "--read", type=Path, metavar="FILE.json", help="take its rows and measure nothing"
    )
    options = parser.parse_args(given)
    if options.report:
        options.within = options.within or REPORT_SECONDS
        options.kinds = options.kinds or list(REPORT_KINDS)
        for name in FORMS if find_spec("matplotlib") else FORMS[:3]:
            suffix = SUFFIXES.get(name, name)
            if getattr(options, name) is None:
                setattr(options, name, options.report / f"bench.{suffix}")
    return options


def plan(options: argparse.Namespace) -> Plan:
    """What the command line asks for."""
    device = device_of("torchkiln.bench", options.device)
    kinds = tuple(options.kinds or [CALLS])
    if SMALL in kinds and device.type == "cpu":
        raise ValueError(
            "torchkiln.bench: --small: got device cpu, expected a GPU, whose graphs it needs; "
            "type --shape 4x256 for small calls on a CPU"
        )
    if options.memory and device.type == "cpu":
        raise ValueError(
            "torchkiln.bench: --memory: got device cpu, expected a GPU, whose allocator knows its "
            "peak; leave it out, or time on a GPU"
        )
    gauge = CudaGauge(device) if options.memory else None
    specs = specs_of("torchkiln.bench", "--specs", options.specs) if options.specs else SPECS
    on_cpu = options.threads or (torch.get_num_threads(),)
    return Plan(
        specs=tuple(named(options.ops, specs)),
        device=device,
        settings=Settings(device_clock(device), options.peers, gauge=gauge),
        shapes=tuple(options.shape or ()),
        dtypes=options.dtype,
        kinds=kinds,
        directions=tuple(options.directions or [FORWARD, BACKWARD]),
        threads=on_cpu if device.type == "cpu" else (None,),
        within=options.within,
        is_report=options.report is not None,
    )


def measure(chosen: Plan, here: Environment) -> tuple[Record, bool]:
    """Go through the plan and tell what happens; whether it was gone through to its end."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    pieces = chosen.pieces()
    whole = True
    with terminal.progress(len(pieces)) as progress:
        try:
            for words, found in pieces:
                progress.begin(words)
                for entry in found:
                    progress.done(entry)
                    if isinstance(entry, Skipped):
                        skipped.append(entry)
                    else:
                        rows.append(entry)
        except KeyboardInterrupt:
            whole = False
    return Record(here, tuple(rows), tuple(skipped)), whole


def write(options: argparse.Namespace, record: Record, changed: Changes | None) -> None:
    """Everything that was asked for."""
    if options.json:
        record.write(options.json)
    if options.csv:
        csvfile.write(options.csv, record)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(markdown(record), encoding="utf-8")
    if options.html or options.plot:
        from torchkiln.bench import charts, page  # noqa: PLC0415

        if options.html:
            page.write(options.html, record, changed)
        if options.plot:
            charts.write(options.plot, record)


def read(argument: str, path: Path) -> Record:
    """A file of an earlier run."""
    try:
        return Record.read(path)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"torchkiln.bench: {argument}: got {path} ({type(error).__name__}: {error}), expected "
            "a file that --json wrote"
        ) from error


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write. 1 for a regression or for nothing at all, 130 after Ctrl-C."""
    options = arguments(given)
    try:
        if (options.html or options.plot) and find_spec("matplotlib") is None:
            raise ValueError(
                f"torchkiln.bench: {'--plot' if options.plot else '--html'}: got no module "
                "matplotlib, expected the packages that draw; type: python -m pip install "
                "'torchkiln[cli]'"
            )
        old = read("--compare", options.compare) if options.compare else None
        record = read("--read", options.read) if options.read else None
        chosen = None if record else plan(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    whole = True
    if chosen is not None:
        here = environment(chosen.device)
        print(here)
        record, whole = measure(chosen, here)
    assert record is not None
    terminal.show(tables(record.rows))
    for entry in record.skipped:
        print(entry)
    if options.report and not options.html:
        print("no pictures: there is no module matplotlib; --read draws them where there is one")
    changed = changes(old, record, options.threshold) if old else None
    if changed is not None:
        terminal.show([changed.table()])
    write(options, record, changed)
    if not whole:
        print(f"stopped: {len(record.rows)} rows were measured, and written", file=sys.stderr)
        return 130
    slower = changed is not None and bool(changed.regressions)
    return 1 if slower or not record.rows else 0


if __name__ == "__main__":
    sys.exit(main())
