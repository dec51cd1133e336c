"""Tell whether the operators run here and how, what keeps them from it, and what to type."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from torchkiln.doctor.environment import Environment
from torchkiln.doctor.examination import examine


def main(given: Sequence[str] | None = None) -> int:
    """Look, tell; 1 where there is a problem."""
    parser = argparse.ArgumentParser(prog="torchkiln doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(given)
    found = examine(Environment.here())
    print(json.dumps(found.as_dict(), indent=1) if options.json else found)
    return 1 if found.problems else 0
