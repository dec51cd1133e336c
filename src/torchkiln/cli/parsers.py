"""Parsers of commands that import torch. The parsers do not, so that --help answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchkiln.cli.options import (
    DIRECTIONS,
    DTYPES,
    add_direction,
    add_json,
    device,
    dtype_name,
    shape,
)
from torchkiln.ops.names import ALIASES, FAMILIES


def op_list() -> str:
    """The ops by family, for the end of --help."""
    public = {op: alias for alias, op in ALIASES.items()}
    lines = [
        f"  {family:<18}{', '.join(public.get(op, op) for op in ops)}"
        for family, ops in FAMILIES.items()
    ]
    equal = "; ".join(f"{alias} and {op} are one op" for alias, op in ALIASES.items())
    return "\n".join(["ops:", *lines, equal])


def parser(command: str, words: str, *, ops: bool = False) -> argparse.ArgumentParser:
    """An empty parser; with ``ops``, its help ends with the list of ops."""
    return argparse.ArgumentParser(
        prog=f"torchkiln {command}",
        description=words,
        epilog=op_list() if ops else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_call(options: argparse.ArgumentParser) -> None:
    """Add the options that describe one call of one op."""
    add = options.add_argument
    add("op", metavar="OP", help="name of an op, from the list below or of --specs")
    add("--specs", metavar="MODULE", help="take ops of SPECS in a module or a .py file")
    add("--shape", type=shape, metavar="RxC", help="rows and columns (default: large)")
    add(
        "--dtype",
        type=dtype_name,
        default="float32",
        metavar="DTYPE",
        help=f"{', '.join(DTYPES)} (default: float32)",
    )
    add("--device", type=device, help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add("--variant", help="another call of the op's benchmark, such as one with other strides")


def demo(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of ``torchkiln demo``."""
    words = (
        "Compare every op with float64 and eager torch, train a classifier with both, plot the "
        "results. It takes about a minute on two idle CPU cores."
    )
    options = parser("demo", words)
    add = options.add_argument
    add("--out", type=Path, default=Path(), metavar="FOLDER", help="folder of the picture")
    size = options.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="smaller tensors, fewer steps")
    size.add_argument(
        "--full",
        action="store_true",
        help="all rows of both tables, an explained call, and larger tensors (minutes)",
    )
    add_json(options)
    return options.parse_args(given)


def explain(given: Sequence[str]) -> argparse.Namespace:
    """Parse the options of ``torchkiln explain``."""
    words = "Print the kernels that a call runs, and each copy, cast or fallback with its reason."
    options = parser("explain", words, ops=True)
    options.epilog = f"{options.epilog}\nconv_bn_act too, which calls ops; folded in a forward"
    add_call(options)
    add_direction(options, "forward", "both", default="both")
    add_json(options)
    return options.parse_args(given)


def judge(given: Sequence[str]) -> argparse.Namespace:
    """Parse the options of ``torchkiln judge``."""
    words = "Run a kernel in a process of its own; print whether it is right, fast and honest."
    options = parser("judge", words)
    add = options.add_argument
    file = "a .py file with a class ModelNew, or with a function of the name in --op"
    add("candidate", nargs="?", type=Path, metavar="CANDIDATE", help=file)
    reference = "a .py file as of KernelBench: Model, get_inputs, get_init_inputs"
    add("reference", nargs="?", type=Path, metavar="REFERENCE", help=reference)
    add("--op", metavar="OP", help="an op of torchkiln, or of --specs, in place of REFERENCE")
    add("--specs", metavar="MODULE", help="take the op of SPECS in a module or a .py file")
    folder = "judge NAME.py and NAME__WORDS.py, each beside reference/NAME.py"
    add("--folder", type=Path, metavar="DIR", help=folder)
    add("--device", type=device, help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add("--no-compile", action="store_true", help="do not time the reference under torch.compile")
    add_json(options)
    return options.parse_args(given)


def profile(given: Sequence[str]) -> argparse.Namespace:
    """Parse the options of ``torchkiln profile``."""
    words = "Print what the GPU's hardware counters measure in one call of an op."
    options = parser("profile", words, ops=True)
    add_call(options)
    add_direction(options, *DIRECTIONS, default="forward")
    add_json(options)
    add = options.add_argument
    add("--out", type=Path, metavar="FILE.ncu-rep", help="ncu's report (default: in build/profile)")
    add("--no-counters", action="store_true", help="only times, without ncu")
    # the words are passed to ncu
    return options.parse_args(given, argparse.Namespace(words=list(given)))


def replace(given: Sequence[str]) -> argparse.Namespace:
    """Parse the options of ``torchkiln replace``."""
    words = "Make a model, print which of its modules get a forward of torchkiln."
    options = parser("replace", words)
    add = options.add_argument
    add("factory", metavar="MODULE:FACTORY", help="a function without arguments, or a class")
    place = options.add_mutually_exclusive_group()
    for name, value, text in (
        ("meta", True, "make the model on the meta device, without memory (the default)"),
        ("real", False, "make the model on its device, with its parameters"),
    ):
        place.add_argument(
            f"--{name}", dest="meta", action="store_const", const=value, default=True, help=text
        )
    add("--exact", action="store_true", help="only what is bitwise equal")
    add("--only", action="append", metavar="KIND", help="norm, activation, glu, ...; repeatable")
    add("--skip", action="append", default=[], metavar="NAME", help="a pattern; repeatable")
    add("--dtype", type=dtype_name, metavar="DTYPE", help=f"of the model: {', '.join(DTYPES)}")
    add_json(options)
    return options.parse_args(given)


def watch(given: Sequence[str]) -> argparse.Namespace:
    """Parse the options of ``torchkiln watch``."""
    words = "Compile a file of kernels and run its test at every save, until Ctrl-C."
    options = parser("watch", words)
    add = options.add_argument
    add("source", type=Path, metavar="FILE", help="CUDA kernels, as for torchkiln.jit.load")
    add("--test", type=Path, metavar="FILE", help="Python: tests for pytest, or a script")
    folder = "folder with headers; repeatable"
    add("--include", type=Path, action="append", default=[], metavar="FOLDER", help=folder)
    return options.parse_args(given)
