"""Time ops beside their peers and beside what the device can do at most."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from torchkiln.bench import terminal
from torchkiln.bench.cases import BACKWARD, FORWARD, named
from torchkiln.bench.clock import device_clock
from torchkiln.bench.environment import default_device, environment
from torchkiln.bench.measure import Settings
from torchkiln.bench.memory import CudaGauge
from torchkiln.bench.peers import PEERS
from torchkiln.bench.plan import CALLS, DTYPES, HOST, SMALL, SWEEP, Plan, Shape
from torchkiln.bench.record import Record
from torchkiln.bench.row import Row
from torchkiln.bench.sweep import draw
from torchkiln.bench.table import markdown, tables
from torchkiln.testing.spec import FLOATING

NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATING}


def shape(text: str) -> Shape:
    """Rows and columns, such as 4096x4096."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected rows and columns, such as 4096x4096"
        )
    return int(match[1]), int(match[2])


def dtypes(text: str) -> tuple[torch.dtype, ...]:
    """Names separated by commas."""
    for name in text.split(","):
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected one of {', '.join(NAMES)}")
    return tuple(NAMES[name] for name in text.split(","))


def counts(text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text) is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers, such as 1,2")
    return tuple(int(number) for number in text.split(","))


def peers(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    for name in text.split(","):
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected one of {', '.join(PEERS)}")
    return tuple(text.split(","))


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m torchkiln.bench", description=__doc__)
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help="names of ops (default: all)")
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
    add("--plot", type=Path, metavar="FILE.png", help="draw the sweep")
    add("--json", type=Path, metavar="FILE", help="write all rows")
    add("--markdown", type=Path, metavar="FILE", help="write the tables")
    return parser.parse_args(given)


def plan(options: argparse.Namespace) -> Plan:
    """What the command line asks for."""
    device = default_device()
    if options.device == "cuda" and device.type == "cpu":
        raise ValueError(
            "torchkiln.bench: --device: got cuda, expected a GPU and a build with kernels for it; "
            "torchkiln.build_info() and torch.cuda.is_available() say which is missing"
        )
    device = torch.device("cpu") if options.device == "cpu" else device
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
    if options.plot and SWEEP not in kinds:
        raise ValueError(
            "torchkiln.bench: --plot: got no sweep, expected row lengths to draw; type --sweep, too"
        )
    if options.plot and find_spec("matplotlib") is None:
        raise ValueError(
            "torchkiln.bench: --plot: got no module matplotlib, expected the packages that draw; "
            "type: python -m pip install 'torchkiln[cli]'"
        )
    gauge = CudaGauge(device) if options.memory else None
    on_cpu = options.threads or (torch.get_num_threads(),)
    return Plan(
        specs=tuple(named(options.ops)),
        device=device,
        settings=Settings(device_clock(device), options.peers, gauge=gauge),
        shapes=tuple(options.shape or ()),
        dtypes=options.dtype,
        kinds=kinds,
        directions=tuple(options.directions or [FORWARD, BACKWARD]),
        threads=on_cpu if device.type == "cpu" else (None,),
    )


def measure(chosen: Plan) -> list[Row]:
    """Go through the plan and tell what happens."""
    rows = []
    pieces = chosen.pieces()
    with terminal.progress(len(pieces)) as progress:
        for words, found in pieces:
            progress.begin(words)
            for row in found:
                progress.done(row)
                rows.append(row)
    return rows


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = arguments(given)
    try:
        chosen = plan(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    here = environment(chosen.device)
    print(here)
    record = Record(here, tuple(measure(chosen)))
    terminal.show(tables(record.rows))
    if options.plot:
        draw(options.plot, str(here), (row for row in record.rows if row.kind == SWEEP))
    if options.json:
        record.write(options.json)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(markdown(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
