"""The program that ncu profiles: one call of an op, warm, between cudaProfilerStart and -Stop."""

from __future__ import annotations

import argparse
import sys

import torch

from torchkiln.bench.case import BACKWARD, BenchCase, call_of
from torchkiln.cli import parsers
from torchkiln.cli.op_arguments import requested_case

WHERE = "torchkiln.profile"


def profiled_case(options: argparse.Namespace) -> BenchCase:
    """The call that the options describe; ValueError if there is none."""
    case = requested_case(WHERE, options)
    if options.direction == BACKWARD and not case.spec.differentiable:
        raise ValueError(
            f"{WHERE}: --backward: got {case.spec.name}, expected an op that has gradients"
        )
    return case


def main() -> None:
    """Make the call."""
    options = parsers.profile(sys.argv[1:])
    case = profiled_case(options)
    call = call_of(case, case.spec.op, options.direction)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    with torch.cuda.nvtx.range(f"torchkiln.{case.spec.name} {options.direction}"):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
