"""Makes a call of an op from the options of :func:`torchkiln.cli.parsers.add_call`."""

from __future__ import annotations

import argparse

import torch

from torchkiln.bench.case import BenchCase, cases
from torchkiln.bench.plan import default_shape, device_of
from torchkiln.bench.result import NO_MEMORY, reason_of
from torchkiln.cli.status import CannotRun, Status, refused
from torchkiln.testing import SPECS
from torchkiln.testing.registry import find, specs_of


def requested_case(where: str, options: argparse.Namespace) -> BenchCase:
    """Find the call among those that the benchmark times; ValueError if there is none."""
    specs = specs_of(where, "--specs", options.specs) if options.specs else SPECS
    spec = find(where, "OP", options.op, specs)
    device = device_of(where, options.device)
    dtype: torch.dtype = getattr(torch, options.dtype)
    if dtype not in spec.dtypes:
        names = ", ".join(str(taken).removeprefix("torch.") for taken in spec.dtypes)
        raise ValueError(
            f"{where}: --dtype: got {options.dtype}, expected one of {names}, which {spec.name} "
            "takes"
        )
    known = []
    for case in cases(spec, device, dtype, options.shape or default_shape(device)):
        if case.variant == (options.variant or ""):
            return case
        known.append(case.variant)
    raise ValueError(
        f"{where}: --variant: got {options.variant!r}, expected "
        f"{' or '.join(repr(v) for v in known if v) or f'none: {spec.name} has one call'}"
    )


def print_refusal(where: str, options: argparse.Namespace, error: Exception) -> Status:
    """Print why the call cannot be made; returns the exit status."""
    if reason_of(error) == NO_MEMORY:
        given = "x".join(map(str, options.shape)) if options.shape else "none"
        error = CannotRun(f"{where}: --shape: got {given}, expected a smaller one: {NO_MEMORY}")
    return refused(error)
