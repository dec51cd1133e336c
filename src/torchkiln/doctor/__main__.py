"""Check where the ops run on this machine, what prevents them, and which command helps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torchkiln.doctor.environment import Environment
from torchkiln.doctor.report import examine


def main(given: Sequence[str] | None = None) -> int:
    """Examine this machine and print the report; 1 if there is a problem, else 0."""
    parser = argparse.ArgumentParser(prog="torchkiln doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args(given)
    report = examine(Environment.here())
    print(report.to_json(1) if options.json else report)
    return 1 if report.problems else 0
