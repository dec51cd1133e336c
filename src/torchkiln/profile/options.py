"""The command line of ``torchkiln profile`` and of what ncu runs for it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchkiln.bench.bench_case import BACKWARD, FORWARD, BenchCase
from torchkiln.cli.op_arguments import add_call, chosen_case

WHERE = "torchkiln.profile"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="torchkiln profile", description="What the GPU's counters say of one call of an op."
    )
    add_call(parser)
    parser.add_argument(
        "--backward",
        dest="direction",
        action="store_const",
        const=BACKWARD,
        default=FORWARD,
        help="the backward instead of the forward",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.ncu-rep", help="the report (default: in build/profile)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--no-counters", action="store_true", help="times alone, without ncu")
    return parser.parse_args(given)


def case_of(options: argparse.Namespace) -> BenchCase:
    """The call that is profiled."""
    case = chosen_case(WHERE, options)
    if options.direction == BACKWARD and not case.spec.differentiable:
        raise ValueError(
            f"{WHERE}: --backward: got {case.spec.name}, expected an op that has gradients"
        )
    return case
