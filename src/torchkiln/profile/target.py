"""What ncu runs: a call of an op, warm, and once more between cudaProfilerStart() and -Stop()."""

from __future__ import annotations

import sys

import torch

from torchkiln.bench.bench_case import call_of
from torchkiln.profile.options import arguments, case_of


def main() -> None:
    """Make the call."""
    options = arguments(sys.argv[1:])
    case = case_of(options)
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
