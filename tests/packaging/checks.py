"""Output and exit status of a script that runs checks."""

from __future__ import annotations

from collections.abc import Iterable


class Checks:
    """Prints the outcome of each check, and stores whether one has failed."""

    def __init__(self) -> None:
        self.failed = False

    def none(self, what: str, offending: Iterable[str]) -> None:
        """Prints whether the check has passed: the list of offending lines is empty."""
        found = sorted(offending)
        print(f"{'FAILED' if found else 'ok    '} {what}")
        for line in found[:20]:
            print(f"         {line}")
        if len(found) > 20:
            print(f"         ... and {len(found) - 20} more")
        self.failed |= bool(found)
