"""Run ncu on one call of an op and print what matters; without counters, times by other means."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torchkiln.bench.bench_case import BenchCase, call_of
from torchkiln.bench.clock import Times, device_clock, in_turns
from torchkiln.bench.table import duration, size
from torchkiln.cli.op_arguments import refuse
from torchkiln.profile import ncu
from torchkiln.profile.options import WHERE, arguments, case_of
from torchkiln.profile.report import Figures, read
from torchkiln.profile.times import kernels
from torchkiln.testing.environment import environment

BUDGET = 1.0


def main(given: Sequence[str] | None = None) -> int:
    """Profile, print, write."""
    words = list(sys.argv[1:] if given is None else given)
    options = arguments(words)
    try:
        case = case_of(options)
    except (ValueError, RuntimeError, MemoryError) as error:
        return refuse(WHERE, options, error)
    device = case.sample.args[case.sample.positions[0]].device
    call = call_of(case, case.spec.op, options.direction)
    clock = device_clock(device)
    times = Times.of(in_turns(clock, {"op": call}, BUDGET)["op"])
    moved = case.moved(options.direction)
    dtype = str(case.dtype).removeprefix("torch.")
    shape = f"{case.shape[0]} x {case.shape[1]}"
    print(environment(device))
    print(f"{case.spec.name} {case.variant} {dtype} {shape} {options.direction}".replace("  ", " "))
    print(f"  {duration(times.seconds)} by the benchmark's clock, spread {times.spread:.1%}")
    print(f"  {size(moved)} have to be moved: {moved / times.seconds / 1e9:.4g} GB/s")
    figures: list[Figures] = []
    missing = None
    try:
        if device.type == "cpu":
            raise ncu.Unavailable("a CPU has no counters that ncu reads")
        if options.no_counters:
            raise ncu.Unavailable("--no-counters was given")
        report = options.out or Path("build", "profile", f"{name_of(case, options.direction)}")
        figures = read(ncu.run(report.with_suffix(".ncu-rep"), words))
        if not figures:
            raise ncu.Unavailable("ncu's report has no kernels that could be read")
    except ncu.Unavailable as reason:
        missing = str(reason)
        print(f"no counters: {missing}")
        for line in kernels(call, device):
            print(f"  {line}")
    else:
        print_figures(figures, times, moved)
        print(f"report: {report.with_suffix('.ncu-rep').resolve()} (ncu-ui opens it)")
    if options.json:
        content = {
            "environment": asdict(environment(device)),
            "op": case.spec.name,
            "variant": case.variant,
            "dtype": dtype,
            "shape": case.shape,
            "direction": options.direction,
            "bytes": moved,
            "clock": asdict(times),
            "kernels": [asdict(entry) for entry in figures],
            "missing": missing,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def print_figures(figures: list[Figures], times: Times, moved: int) -> None:
    """The kernels, and how the counters' sums differ from clock and spec."""
    for entry in figures:
        print("\n".join(entry.lines()))
    seconds = [entry.seconds for entry in figures if entry.seconds is not None]
    if len(seconds) == len(figures):
        change = sum(seconds) / times.seconds - 1
        words = f"all kernels: {duration(sum(seconds))} by ncu, {change:+.1%} of the clock's time"
        print(words)
    traffic = sum((entry.read or 0.0) + (entry.written or 0.0) for entry in figures)
    if moved and traffic:
        change = traffic / moved - 1
        print(
            f"DRAM traffic: {size(round(traffic))}, {change:+.1%} of what has to be moved"
            + (" (what the L2 cache still holds is not written yet)" if change < 0 else "")
        )


def name_of(case: BenchCase, direction: str) -> str:
    """Of a report."""
    dtype = str(case.dtype).removeprefix("torch.")
    shape = f"{case.shape[0]}x{case.shape[1]}"
    words = [case.spec.name, *case.variant.split(), dtype, shape, direction]
    return "-".join(word.replace("/", "_") for word in words)


if __name__ == "__main__":
    sys.exit(main())
