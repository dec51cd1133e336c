"""The program that ncu profiles: one call of an op, warm, between cudaProfilerStart and -Stop."""

from __future__ import annotations

import argparse
import sys

import torch

from torchkiln.bench.case import FORWARD, STEP, BenchCase, call_of
from torchkiln.cli import parsers
from torchkiln.cli.op_arguments import requested_case

WHERE = "torchkiln.profile"


def profiled_case(options: argparse.Namespace) -> BenchCase:
    """The call that the options describe; ValueError if there is none."""
    case = requested_case(WHERE, options)
    if options.direction != FORWARD and not case.spec.differentiable:
        raise ValueError(
            f"{WHERE}: --direction: got {options.direction}, expected forward: {case.spec.name} "
            "has no gradients"
        )
    return case


def moment(options: argparse.Namespace) -> str:
    """The part of the call that is made, as the benchmark names it."""
    return STEP if options.direction == "both" else str(options.direction)


def main() -> None:
    """Make the call that ncu profiles."""
    options = parsers.profile(sys.argv[1:])
    case = profiled_case(options)
    direction = moment(options)
    call = call_of(case, case.spec.op, direction)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    with torch.cuda.nvtx.range(f"torchkiln.{case.spec.name} {direction}"):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
