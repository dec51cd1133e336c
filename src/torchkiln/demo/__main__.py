"""Compare every op with float64 and with eager torch, train a classifier both ways, draw both."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchkiln.demo.accuracy import all_errors
from torchkiln.demo.speed import all_timings
from torchkiln.demo.train import train_both

try:
    from torchkiln.demo import picture, report
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in {"rich", "matplotlib", "numpy"}:
        raise
    sys.exit(
        f"torchkiln.demo: got no module {error.name}, expected the packages that draw and print; "
        "type: python -m pip install 'torchkiln[cli]'"
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="torchkiln demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the picture")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer steps")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Run the tour; 1 where a result is wrong."""
    options = arguments(given)
    device = report.environment()
    errors = all_errors(device)
    report.errors(errors)
    timings = report.with_progress("timing", all_timings(device, quick=options.quick))
    report.timings(timings)
    report.explanation(device)
    outcome = report.training(train_both(device, quick=options.quick))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "torchkiln-demo.png"
    picture.draw(path, device, timings, outcome)
    return report.verdict(path, errors, outcome)


if __name__ == "__main__":
    sys.exit(main())
