"""One call of one op, as a command line names it."""

from __future__ import annotations

import argparse
import sys

import torch

from torchkiln.bench.bench_case import BenchCase, cases
from torchkiln.bench.options import device_of, dtype, shape
from torchkiln.bench.plan import default_shape
from torchkiln.bench.skipped import NO_MEMORY, reason_of
from torchkiln.testing import SPECS
from torchkiln.testing.registry import find, specs_of


def add_call(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("op", metavar="OP", help="the name of an op")
    add("--specs", metavar="MODULE", help="of SPECS in a module or a .py file")
    add("--shape", type=shape, metavar="RxC", help="rows and columns (default: large)")
    add("--dtype", type=dtype, default=torch.float32, help="default: float32")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    add("--variant", help="one of the benchmark's other calls, such as those of other strides")


def refuse(where: str, options: argparse.Namespace, error: Exception) -> int:
    """Say why the call cannot be made; the exit status."""
    reason = reason_of(error)
    if reason is None or not reason.startswith(NO_MEMORY):
        print(error, file=sys.stderr)
        return 2
    given = "x".join(map(str, options.shape)) if options.shape else "none"
    print(f"{where}: --shape: got {given}, expected a smaller one: {reason}", file=sys.stderr)
    return 1


def chosen_case(where: str, options: argparse.Namespace) -> BenchCase:
    """The call: one of those that are timed."""
    specs = specs_of(where, "--specs", options.specs) if options.specs else SPECS
    spec = find(where, "OP", options.op, specs)
    device = device_of(where, options.device)
    if options.dtype not in spec.dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in spec.dtypes)
        raise ValueError(
            f"{where}: --dtype: got {str(options.dtype).removeprefix('torch.')}, expected one of "
            f"{names}, which {spec.name} takes"
        )
    known = []
    for case in cases(spec, device, options.dtype, options.shape or default_shape(device)):
        if case.variant == (options.variant or ""):
            return case
        known.append(case.variant)
    raise ValueError(
        f"{where}: --variant: got {options.variant!r}, expected "
        f"{' or '.join(repr(v) for v in known if v) or f'none: {spec.name} has one call'}"
    )
