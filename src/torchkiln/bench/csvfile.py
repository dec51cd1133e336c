"""Rows as comma-separated values: a line for each time."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from torchkiln.bench.row import OURS

if TYPE_CHECKING:
    from pathlib import Path

    from torchkiln.bench.record import Record

HEADINGS = (
    *("date", "device", "torch", "commit", "kind", "op", "variant", "dtype", "rows", "columns"),
    *("direction", "threads", "bytes", "operations", "who", "role"),
    *("seconds", "low", "high", "rounds", "peak_bytes"),
)


def write(path: Path, record: Record) -> None:
    """Ours, the peers' (also those that do something else) and the references'."""
    here = record.environment
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(HEADINGS)
        for row in record.rows:
            call = (row.kind, row.op, row.variant, row.dtype, *row.shape, row.direction)
            where = (here.date, here.device, here.torch, here.commit, *call, row.threads)
            for who, times in {**row.times, **row.references}.items():
                role = "reference" if who in row.references else "peer"
                role = "ours" if who == OURS else "remarked" if who in row.remarks else role
                figures = (times.seconds, times.low, times.high, times.rounds, row.peaks.get(who))
                out.writerow((*where, row.bytes, row.operations, who, role, *figures))
