"""Check where the ops run on this machine, what prevents them, and which command helps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torchkiln.cli.options import STDOUT, add_json, output_json
from torchkiln.cli.status import Status, refused
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.report import examine


def main(given: Sequence[str] | None = None) -> int:
    """Examine this machine and print the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="torchkiln doctor", description=__doc__)
    add_json(parser)
    options = parser.parse_args(given)
    report = examine(Environment.here())
    try:
        output_json("torchkiln.doctor", options.json, report.to_json(1))
    except ValueError as error:
        return refused(error)
    if options.json != STDOUT:
        print(report)
    return Status.FOUND if report.problems else Status.DONE
