"""The parser of ``torchkiln bench``, without torch.

The choices equal those of :mod:`torchkiln.bench`, which imports torch; a test compares them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from torchkiln.cli.options import (
    DIRECTIONS,
    DTYPES,
    add_direction,
    add_json,
    device,
    dtype_name,
    make_folder,
    require_json,
    shape,
)
from torchkiln.cli.parsers import parser

DEFAULT_DTYPES = ("float32", "bfloat16")
COMPILE_DTYPES = ("float32", "float16", "bfloat16")
"""The default with ``--compile``: dtypes in which models are trained."""
PEERS = ("eager", "compile", "liger", "quack", "cudnn", "torchao", "trl", "torch")
REPORT_SECONDS = 8 * 60
REPORT_KINDS = ("host", "calls", "sweep")


def dtypes(text: str) -> tuple[str, ...]:
    """Names of dtypes, separated by commas, as torch names them."""
    return tuple(dtype_name(name) for name in text.split(","))


def counts(text: str) -> tuple[int, ...]:
    """Positive integers, separated by commas."""
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text) is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers, such as 1,2")
    return tuple(int(number) for number in text.split(","))


def minutes(text: str) -> float:
    """A number of minutes, converted to seconds."""
    return 60 * positive(text)


def positive_count(text: str) -> int:
    """One positive integer."""
    (number,) = counts(text) if "," not in text else (0,)
    if not number:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one number, such as 3000")
    return number


def percent(text: str) -> float:
    """A percentage, converted to a fraction."""
    return positive(text.removesuffix("%")) / 100


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return value


def peers(text: str) -> tuple[str, ...]:
    """Names of peers, separated by commas."""
    for name in text.split(","):
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected one of {', '.join(PEERS)}")
    return tuple(text.split(","))


def bench(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of ``torchkiln bench``."""
    words = "Time ops, their peers and their ceiling, a copy of as many bytes, in turns."
    options = parser("bench", words, ops=True)
    add = options.add_argument
    add("ops", nargs="*", metavar="OP", help="names of ops, from the list below (default: all)")
    add("--specs", metavar="MODULE", help="take the ops of SPECS in a module or a .py file")
    add("--device", type=device, help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    usual = f"{','.join(DEFAULT_DTYPES)}; with --compile float16, too"
    add(
        "--dtype",
        type=dtypes,
        metavar="DTYPE,...",
        help=f"{', '.join(DTYPES)} (default: {usual})",
    )
    add(
        "--shape",
        type=shape,
        action="append",
        metavar="RxC",
        help="rows and columns; repeatable (default: chosen for each op)",
    )
    add("--peers", type=peers, default=PEERS, help=f"default: {','.join(PEERS)}, where installed")
    add("--threads", type=counts, help="CPU threads, such as 1,2 (default: torch's number)")
    add_direction(options, *DIRECTIONS, default="both")
    kinds = options.add_argument_group("calls to time (default: --calls)")
    for name, words in (
        ("calls", "single calls on large tensors"),
        ("sweep", "single calls on as many elements in rows of 256 ... 262143"),
        ("rows", "single calls on 1 ... 1 M rows of 1024"),
        ("small", "calls on 1 K ... 1 M elements, or on few rows, in CUDA graphs"),
        ("host", "time that calls on 4 x 64 elements occupy the host, with and without gradients"),
    ):
        kinds.add_argument(f"--{name}", dest="kinds", action="append_const", const=name, help=words)
    add("--memory", action="store_true", help="peak memory of large calls, too (GPU)")
    add("--fuzz", type=positive_count, metavar="N", help="time N random calls beside eager torch")
    add("--seed", type=int, default=0, metavar="S", help="of the random calls (default: 0)")
    add("--within", type=minutes, metavar="MINUTES", help="time limit for the whole run")
    words = "large calls, host times and row lengths within 8 minutes"
    add("--report", action="store_true", help=words)
    words = "write bench.json, bench.md and pictures there, or the calls of --fuzz, to continue"
    add("--out", type=Path, metavar="FOLDER", help=words)
    words = 'write the table of torch.compile(backend="torchkiln"), from large calls, there'
    add("--compile", type=Path, metavar="FILE", help=words)
    add_json(options)
    before = options.add_argument_group("other runs")
    before.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="print what has changed; 1 if slower"
    )
    before.add_argument(
        "--threshold", type=percent, default=0.05, metavar="%", help="default: 5 %%"
    )
    before.add_argument(
        "--read", type=Path, metavar="FILE.json", help="take the rows of a file, measure nothing"
    )
    found = options.parse_args(given)
    found.dtype = found.dtype or (COMPILE_DTYPES if found.compile else DEFAULT_DTYPES)
    if found.compile and found.peers == PEERS:
        found.peers = ("compile",)
    if found.report:
        found.within = found.within or REPORT_SECONDS
        found.kinds = found.kinds or list(REPORT_KINDS)
    return found


def require_outputs(options: argparse.Namespace) -> None:
    """Refuse output files that could not be written, before anything is measured."""
    if options.out:
        make_folder("torchkiln.bench", "--out", options.out)
    require_json("torchkiln.bench", options.json)
    require_json("torchkiln.bench", options.compile, "--compile")
    if options.compile and not options.read:
        require_table(options)


def require_table(options: argparse.Namespace) -> None:
    """Refuse a run that does not time the calls for a table of ``--compile``."""
    kinds = options.kinds or ["calls"]
    for name, got, expected, is_right in (
        ("--peers", ",".join(options.peers), "compile", "compile" in options.peers),
        ("--direction", options.direction, "both", options.direction == "both"),
        (f"--{kinds[0]}", "it alone", "--calls beside it", "calls" in kinds),
    ):
        if not is_right:
            raise ValueError(
                f"torchkiln.bench: {name}: got {got}, expected {expected}: --compile writes the "
                "times of large calls, forward and backward, and those of torch.compile"
            )
