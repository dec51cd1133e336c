"""``torchkiln profile``: ncu's counters for one call of an op, or its times without counters."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchkiln.bench.case import BenchCase, call_of
from torchkiln.bench.clock import Call, Times, device_clock, in_turns
from torchkiln.bench.report import duration, size
from torchkiln.cli import main
from torchkiln.cli.op_arguments import print_refusal
from torchkiln.cli.options import output_json, require_json, text_output
from torchkiln.cli.status import Status, refused
from torchkiln.profile import ncu
from torchkiln.profile.report import Figures, read
from torchkiln.profile.target import WHERE, moment, profiled_case
from torchkiln.profile.times import kernels
from torchkiln.testing.environment import environment

SCHEMA = "torchkiln.profile/1"
SECONDS = 1.0
"""Seconds of measurement by the benchmark's clock."""


def run(options: argparse.Namespace) -> int:
    """Profile the call, print the figures or write them."""
    try:
        case = profiled_case(options)
        require_json(WHERE, options.json)
    except (ValueError, RuntimeError, MemoryError) as error:
        return print_refusal(WHERE, options, error)
    with text_output(options.json):
        content = profile(options, case)
    try:
        output_json(WHERE, options.json, json.dumps(content, indent=1))
    except ValueError as error:
        return refused(error)
    return Status.DONE


def profile(options: argparse.Namespace, case: BenchCase) -> dict[str, Any]:
    """Profile a call and print the figures; returns them in types of JSON."""
    device = case.sample.args[case.sample.positions[0]].device
    direction = moment(options)
    call = call_of(case, case.spec.op, direction)
    times = Times.of(in_turns(device_clock(device), {"op": call}, SECONDS)["op"])
    moved = case.moved(direction)
    dtype = str(case.dtype).removeprefix("torch.")
    where = environment(device)
    print(where)
    shape = f"{case.shape[0]} x {case.shape[1]}"
    words = (case.spec.name, case.variant, dtype, shape, direction)
    print(" ".join(word for word in words if word))
    print(f"  {duration(times.seconds)} by the benchmark's clock, spread {times.spread:.1%}")
    print(f"  {size(moved)} have to be moved: {moved / times.seconds / 1e9:.4g} GB/s")
    default = Path("build", "profile", report_name(case, direction))
    report = (options.out or default).with_suffix(".ncu-rep")
    figures: list[Figures] = []
    missing = None
    try:
        figures = counters(options, device, report)
    except ncu.Unavailable as reason:
        missing = str(reason)
        print(f"no counters: {missing}")
        print_times(call, device)
    else:
        print_figures(figures, times, moved)
        print(f"report: {report.resolve()} (ncu-ui opens it)")
    return {
        "schema": SCHEMA,
        "environment": asdict(where),
        "op": case.spec.name,
        "variant": case.variant,
        "dtype": dtype,
        "shape": case.shape,
        "direction": direction,
        "bytes": moved,
        "clock": asdict(times),
        "kernels": [asdict(entry) for entry in figures],
        "missing": missing,
    }


def counters(options: argparse.Namespace, device: torch.device, report: Path) -> list[Figures]:
    """Figures of each kernel by ncu; raises Unavailable with the reason if there are none."""
    if device.type == "cpu":
        raise ncu.Unavailable("ncu reads the counters of GPUs only")
    if options.no_counters:
        raise ncu.Unavailable("--no-counters was given")
    figures = read(ncu.run(report, options.words))
    if not figures:
        raise ncu.Unavailable("ncu's report has no kernels that could be read")
    return figures


def print_times(call: Call, device: torch.device) -> None:
    """Print the kernels by torch's profiler, and why its times differ from the benchmark's."""
    if device.type == "cpu":
        print("by torch's profiler, whose bookkeeping adds microseconds to the time of each op:")
    else:
        print("by torch's profiler, with data in the L2 cache that the benchmark's clock flushes:")
    for line in kernels(call, device):
        print(f"  {line}")


def print_figures(figures: list[Figures], times: Times, moved: int) -> None:
    """Print the counters of each kernel, and compare the sums with the clock and the spec."""
    for entry in figures:
        print("\n".join(entry.lines()))
    seconds = [entry.seconds for entry in figures if entry.seconds is not None]
    if len(seconds) == len(figures):
        change = sum(seconds) / times.seconds - 1
        print(f"all kernels: {duration(sum(seconds))} by ncu, {change:+.1%} of the clock's time")
    traffic = sum((entry.read or 0.0) + (entry.written or 0.0) for entry in figures)
    if moved and traffic:
        change = traffic / moved - 1
        cached = " (the L2 cache still holds part of the result)" if change < 0 else ""
        print(
            f"DRAM traffic: {size(round(traffic))}, {change:+.1%} of what has to be moved{cached}"
        )


def report_name(case: BenchCase, direction: str) -> str:
    """File name of ncu's report."""
    dtype = str(case.dtype).removeprefix("torch.")
    shape = f"{case.shape[0]}x{case.shape[1]}"
    words = [case.spec.name, *case.variant.split(), dtype, shape, direction]
    return "-".join(word.replace("/", "_") for word in words)


if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
