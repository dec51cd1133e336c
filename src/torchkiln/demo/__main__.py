"""Compare every op with float64 and eager torch, train a classifier with both, plot the results."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from torchkiln.bench import Measurement
from torchkiln.bench.plan import default_shape
from torchkiln.bench.result import Skipped
from torchkiln.cli import parsers
from torchkiln.cli.options import json_lines, make_folder, output_json, require_json, text_output
from torchkiln.cli.status import Status, refused
from torchkiln.demo import report
from torchkiln.demo.accuracy import all_errors
from torchkiln.demo.results import Results
from torchkiln.demo.speed import all_timings
from torchkiln.demo.train import Outcome, train_both
from torchkiln.testing.environment import environment

WHERE = "torchkiln.demo"


@dataclass(frozen=True)
class Size:
    """The amount of work in a demo."""

    shape: tuple[int, int]
    """Rows and columns of the tensors that are timed."""
    seconds: float
    """Seconds of measurement per call."""
    steps: int
    """Steps of training."""


def size_of(options: argparse.Namespace, device: torch.device) -> Size:
    """The size of the options; by default about a minute on two CPU cores."""
    if options.quick:
        return Size((512, 512), 0.02, 120)
    if options.full:
        return Size(default_shape(device), 1.5, 500)
    return Size((1024, 512) if device.type == "cpu" else (4096, 8192), 0.05, 500)


def main(given: Sequence[str] | None = None) -> int:
    """Parse the command line and run it."""
    return run(parsers.demo(given))


def run(options: argparse.Namespace) -> int:
    """Run the tour; a wrong result gives the exit status FOUND."""
    try:
        make_folder(WHERE, "--out", options.out)
        require_json(WHERE, options.json)
    except ValueError as error:
        return refused(error)
    with text_output(options.json):
        found = tour(options)
    output_json(WHERE, options.json, json_lines(found.as_dict()))
    return Status.FOUND if found.wrong else Status.DONE


def tour(options: argparse.Namespace) -> Results:
    """Run all parts and print their tables."""
    start = time.perf_counter()
    device = report.environment()
    size = size_of(options, device)
    errors = report.stage(
        "1/4 errors: every op against float64",
        all_errors(device),
        lambda row: f"{row.op} {row.dtype}",
    )
    report.errors(errors, full=options.full)
    shape = f"{size.shape[0]} x {size.shape[1]}"
    entries = report.stage(
        f"2/4 speed: every op beside eager torch at {shape}",
        all_timings(device, size.shape, size.seconds),
        lambda entry: f"{entry.op} {entry.dtype}",
    )
    rows = [entry for entry in entries if isinstance(entry, Measurement)]
    skipped = [entry for entry in entries if isinstance(entry, Skipped)]
    for entry in skipped:
        print(entry)
    report.timings(rows, full=options.full)
    if options.full:
        report.explanation(device)
    *_, outcome = report.stage(
        f"3/4 training: {size.steps} steps with torchkiln and with plain torch",
        train_both(device, size.steps),
        lambda outcome: f"loss {outcome.runs[0].losses[-1]:.4f}",
    )
    report.training(outcome)
    picture = picture_of(options.out, device, rows, outcome)
    results = Results(
        environment(device), tuple(errors), tuple(rows), tuple(skipped), outcome, picture
    )
    report.verdict(results.wrong, picture, time.perf_counter() - start)
    return results


def picture_of(
    folder: Path, device: torch.device, rows: list[Measurement], outcome: Outcome
) -> Path | None:
    """Draw the picture and return its path; None if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        print("\n4/4 picture: left out, there is no module matplotlib; to draw it, type: ", end="")
        print("python -m pip install 'torchkiln[cli]'")
        return None
    from torchkiln.demo import picture  # noqa: PLC0415

    print("\n4/4 picture ...", flush=True)
    path = folder / "torchkiln-demo.png"
    picture.draw(path, device, rows, outcome)
    return path


if __name__ == "__main__":
    sys.exit(main())
