"""The parser of ``torchkiln bench``, without torch.

The choices equal those of :mod:`torchkiln.bench`, which imports torch; a test compares them.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torchkiln.cli.options import DTYPES, dtype_name, make_folder, shape
from torchkiln.cli.parsers import parser

DEFAULT_DTYPES = ("float32", "bfloat16")
PEERS = ("eager", "compile", "liger", "quack", "cudnn")
REPORT_SECONDS = 8 * 60
REPORT_KINDS = ("host", "calls", "sweep")
SUFFIXES = {"json": "json", "markdown": "md", "plot": "png"}
"""The output files, and their names in the folder of ``--report``."""


def dtypes(text: str) -> tuple[str, ...]:
    """Names of dtypes, separated by commas, as torch names them."""
    return tuple(dtype_name(name) for name in text.split(","))


def counts(text: str) -> tuple[int, ...]:
    """Positive integers, separated by commas."""
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text) is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers, such as 1,2")
    return tuple(int(number) for number in text.split(","))


def minutes(text: str) -> float:
    """Minutes, as seconds."""
    return 60 * positive(text)


def positive_count(text: str) -> int:
    """One positive integer."""
    (number,) = counts(text) if "," not in text else (0,)
    if not number:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one number, such as 3000")
    return number


def percent(text: str) -> float:
    """A percentage, as a fraction."""
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
    add("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    add(
        "--dtype",
        type=dtypes,
        default=DEFAULT_DTYPES,
        metavar="DTYPE,...",
        help=f"{', '.join(DTYPES)} (default: {','.join(DEFAULT_DTYPES)})",
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
    direction = options.add_argument_group("direction (default: both)")
    for name in ("forward", "backward"):
        direction.add_argument(f"--{name}", dest="directions", action="append_const", const=name)
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
    add(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="large calls, host times and row lengths within 8 minutes, with all output files",
    )
    outputs = options.add_argument_group("output files")
    for name, words in (
        ("json", "all rows"),
        ("markdown", "the tables"),
        ("plot", "the pictures, each as FILE-<its name>.png"),
    ):
        outputs.add_argument(f"--{name}", type=Path, metavar="FILE", help=words)
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
    if found.report:
        set_report(found)
    return found


def set_report(found: argparse.Namespace) -> None:
    """Set the options that ``--report`` implies and that were not given."""
    found.within = found.within or REPORT_SECONDS
    found.kinds = found.kinds or list(REPORT_KINDS)
    for name, suffix in SUFFIXES.items():
        if getattr(found, name) is None and (name != "plot" or find_spec("matplotlib")):
            setattr(found, name, found.report / f"bench.{suffix}")


def require_outputs(options: argparse.Namespace) -> None:
    """Refuse output files that could not be written, before anything is measured."""
    if options.report:
        make_folder("torchkiln.bench", "--report", options.report)
    for name in SUFFIXES:
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        if name == "plot" and find_spec("matplotlib") is None:
            raise ValueError(
                f"torchkiln.bench: --{name}: got no module matplotlib, expected the packages that "
                "draw; type: python -m pip install 'torchkiln[cli]'"
            )
        folder = path.absolute().parent
        if not folder.is_dir():
            raise ValueError(
                f"torchkiln.bench: --{name}: got {path}, expected a file in a folder that exists; "
                f"type: mkdir -p {folder}"
            )
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ValueError(
                f"torchkiln.bench: --{name}: got {path}, expected a file that can be written"
            )
