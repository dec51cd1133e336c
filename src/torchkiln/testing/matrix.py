"""Tables of op x check from the result files of actual runs.

``python -m torchkiln.testing.matrix RESULTS.json [RESULTS.json ...] --page docs/contract.md``
writes them between the marks ``<!-- contract -->`` and ``<!-- /contract -->`` of a page.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchkiln.testing.contract import CHECKS

MARKS = "<!-- contract -->", "<!-- /contract -->"
SIGNS = {"passed": "+", "failed": "**FAILED**"}


@dataclass(frozen=True)
class Run:
    """The results of one run of the suite."""

    environment: dict[str, Any]
    ops: dict[str, dict[str, dict[str, Any]]]
    """Status, reason and dtypes of each check of each op."""

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read the run from a file of ``--contract-results``."""
        found = json.loads(path.read_text())
        ops: dict[str, dict[str, dict[str, Any]]] = {}
        for line in found["results"]:
            ops.setdefault(line["op"], {}).update(dict.fromkeys(line["checks"], line))
        return cls(found["environment"], ops)

    def __str__(self) -> str:
        """Device, versions and date."""
        here = self.environment
        cuda = f" with CUDA {here['cuda']}" if here["cuda"] else ""
        commit = f", commit {here['commit'][:10]}" if here["commit"] else ""
        versions = f"torch {here['torch']}{cuda}, torchkiln {here['torchkiln']}{commit}"
        return f"{here['device']}, {versions}, {here['date']}"

    def cell(self, op: str, check: str) -> dict[str, Any] | None:
        """The result of a check of an op; None if it was not run."""
        return self.ops.get(op, {}).get(check)


class Notes:
    """Footnotes below the table: each reason has one number."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def number(self, reason: str) -> int:
        """The number of a reason."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason) + 1


def sign(cell: dict[str, Any] | None, op: str, notes: Notes) -> str:
    """The text of a cell of the table."""
    if cell is None:
        return ""
    if cell["status"] in SIGNS:
        return SIGNS[cell["status"]]
    return f"({notes.number(cell['reason'].removeprefix(f'not for {op}: '))})"


def table(run: Run) -> str:
    """A row for each op, a column for each check by its number."""
    checks = [
        (i, name) for i, name in enumerate(CHECKS, 1) if any(name in c for c in run.ops.values())
    ]
    notes = Notes()
    lines = [
        "| | " + " | ".join(str(i) for i, _ in checks) + " |",
        "|---" * (len(checks) + 1) + "|",
    ]
    for op in run.ops:
        cells = " | ".join(sign(run.cell(op, name), op, notes) for _, name in checks)
        lines.append(f"| `{op}` | {cells} |")
    found = [cell["status"] for cells in run.ops.values() for cell in cells.values()]
    head = f"{run}: {found.count('passed')} of {len(found)} passed"
    if failed := found.count("failed"):
        head += f", **{failed} failed**"
    reasons = [f"({i}) {reason}" for i, reason in enumerate(notes.reasons, 1)]
    return "\n".join([head + ".", "", *lines, "", *(f"{reason}  " for reason in reasons)]).rstrip()


def promises() -> str:
    """The checks by number, each with its promise."""
    lines = ["| | check | what holds |", "|---|---|---|"]
    for i, check in enumerate(CHECKS.values(), 1):
        lines.append(f"| {i} | `{check.name}` | {check.promise} |")
    return "\n".join(lines)


def page(runs: list[Run]) -> str:
    """The promises, and a table for each run."""
    return "\n\n".join([promises(), *(table(run) for run in runs)])


def written(text: str, runs: list[Run]) -> str:
    """The text of the page with the tables between its marks."""
    before, rest = text.split(MARKS[0], 1)
    after = rest.split(MARKS[1], 1)[1]
    return f"{before}{MARKS[0]}\n{page(runs)}\n{MARKS[1]}{after}"


def main() -> int:
    """Write or print the tables of result files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="files of --contract-results")
    parser.add_argument("--page", type=Path, help="page with the marks; default: print the tables")
    options = parser.parse_args()
    runs = [Run.read(path) for path in options.results]
    if options.page is None:
        print(page(runs))
    else:
        options.page.write_text(written(options.page.read_text(), runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
