"""Results of planted faults: a file that later runs extend, and the tables of the page."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import NamedTuple

from fault import Fault
from faults import FAULTS
from planting import ROOT


class Finding(NamedTuple):
    """The result of one fault."""

    fault: str
    digest: str
    """A hash of the fault and of the file that it changes."""
    result: str
    """caught, missed, or an error."""
    run: str
    """The run with that test: default or full."""
    by: str
    """The test that failed."""
    seconds: float
    machine: str
    date: str
    passes_without: bool = False
    """Whether that test passed without the fault."""


def digest_of(fault: Fault) -> str:
    """A hash of the fault and of the file that it changes."""
    text = (ROOT / fault.file).read_text()
    return hashlib.sha256(f"{tuple(fault)}{text}".encode()).hexdigest()[:12]


class Results:
    """The findings, in a file with one line of JSON each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = json.loads(path.read_text()) if path.exists() else []
        known = {fault.name for fault in FAULTS}
        self.found = {row["fault"]: Finding(**row) for row in rows if row["fault"] in known}
        self.lock = threading.Lock()

    def is_done(self, fault: Fault) -> bool:
        """Whether the present version of the fault was caught."""
        found = self.found.get(fault.name)
        return found is not None and found.result == "caught" and found.digest == digest_of(fault)

    def add(self, finding: Finding) -> None:
        """Store a finding, also in the file."""
        with self.lock:
            self.found[finding.fault] = finding
            rows = [self.found[fault.name] for fault in FAULTS if fault.name in self.found]
            lines = ",\n".join(json.dumps(row._asdict()) for row in rows)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(f"[\n{lines}\n]\n")


def line_of(fault: Fault, finding: Finding) -> str:
    """The table row of a fault."""
    test = finding.by.removeprefix("tests/contract/test_contract.py::test_contract")
    test = test.removeprefix("tests/ops/")
    test = test[1:-1] if test.startswith("[") else test
    by = f"`{test}`" if finding.result == "caught" else f"**{finding.result}**"
    return f"| {fault.name} | `{fault.file}` | {by} | {finding.run} |"


def table(findings: list[Finding], old: str) -> str:
    """The table of one device; faults that were not tried keep their rows."""
    rows = {
        line.split(" | ")[0].removeprefix("| "): line
        for line in old.splitlines()
        if line.startswith("| ") and not line.startswith("| fault")
    }
    faults = {fault.name: fault for fault in FAULTS}
    rows |= {one.fault: line_of(faults[one.fault], one) for one in findings}
    known = [rows[name] for name in faults if name in rows]
    caught = [row for row in known if "**" not in row]
    default = sum(row.endswith("| default |") for row in caught)
    where = ", ".join(sorted({f"{one.machine}, {one.date}" for one in findings}))
    earlier = len(known) - len(findings)
    where += f"; {earlier} of them in an earlier run" if earlier else ""
    head = f"The default run finds {default} of {len(known)}, the full run {len(caught)}: {where}."
    return "\n".join([head, "", "| fault | in | found by | run |", "|---|---|---|---|", *known])


def write(page: Path, results: Results) -> None:
    """Write new tables for the devices that have results."""
    text = page.read_text()
    for part in ("cpu", "cuda"):
        names = {fault.name for fault in FAULTS if part in fault.device}
        findings = [one for one in results.found.values() if one.fault in names]
        if not findings:
            continue
        marks = f"<!-- {part} -->", f"<!-- /{part} -->"
        before, rest = text.split(marks[0], 1)
        old, after = rest.split(marks[1], 1)
        text = f"{before}{marks[0]}\n{table(findings, old)}\n{marks[1]}{after}"
    page.write_text(text)
