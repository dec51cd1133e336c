"""Tell which kernels a call of an op runs, what is copied, cast or left to torch, and why."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torchkiln.cli.op_arguments import add_call, chosen_case, refuse
from torchkiln.trace import Explanation, explain


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="torchkiln explain", description=__doc__)
    add_call(parser)
    add = parser.add_argument
    add("--forward", action="store_true", help="the forward alone")
    add("--json", type=Path, metavar="FILE", help="write it down; - for the standard output")
    return parser.parse_args(given)


def show(found: Explanation) -> None:
    """Print it, in colours where rich is installed."""
    if find_spec("rich") is None or not sys.stdout.isatty():
        print(found)
        return
    from rich import print as print_tree  # noqa: PLC0415

    print_tree(found)


def main(given: Sequence[str] | None = None) -> int:
    """Call, tell, write."""
    options = arguments(given)
    try:
        case = chosen_case("torchkiln.explain", options)
        sample = case.sample if options.forward else case.spec.leaves(case.sample)
        sample.start_generators()
        found = explain(case.spec.op, *sample.args, **sample.kwargs)
    except (ValueError, RuntimeError, MemoryError) as error:
        return refuse("torchkiln.explain", options, error)
    text = json.dumps(found.as_dict(), indent=1)
    if options.json == Path("-"):
        print(text)
        return 0
    show(found)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0
