"""``torchkiln explain``: run one call of an op and print its kernels and other steps."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from torchkiln.cli.composed import COMPOSED
from torchkiln.cli.op_arguments import print_refusal, requested_case
from torchkiln.cli.options import STDOUT, output_json
from torchkiln.cli.status import Status
from torchkiln.trace import Explanation, explain

WHERE = "torchkiln.explain"


def run(options: argparse.Namespace) -> int:
    """Make the call, print and write the explanation."""
    try:
        if options.op in COMPOSED and not options.specs:
            function, args, kwargs = COMPOSED[options.op](WHERE, options)
            found = explain(function, *args, **kwargs)
        else:
            case = requested_case(WHERE, options)
            is_forward = options.direction == "forward"
            sample = case.sample if is_forward else case.spec.leaves(case.sample)
            sample.start_generators()
            args, kwargs = sample.arguments(case.spec.op)
            found = explain(case.spec.op, *args, **kwargs)
        output_json(WHERE, options.json, found.to_json(1))
    except (ValueError, RuntimeError, MemoryError) as error:
        return print_refusal(WHERE, options, error)
    if options.json != STDOUT:
        show(found)
    return Status.DONE


def show(found: Explanation) -> None:
    """Print the explanation, in colour on a terminal with rich."""
    if find_spec("rich") is None or not sys.stdout.isatty():
        print(found)
        return
    from rich import print as print_tree  # noqa: PLC0415

    print_tree(found)
