"""The file that a benchmark leaves."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torchkiln.bench.row import Row
from torchkiln.bench.skipped import Skipped
from torchkiln.testing.environment import Environment

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Record:
    """A run: where, and all rows. Times are seconds."""

    environment: Environment
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...] = ()

    def write(self, path: Path) -> None:
        """As JSON."""
        content = {
            "environment": asdict(self.environment),
            "rows": [row.to_json() for row in self.rows],
            "skipped": [asdict(entry) for entry in self.skipped],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Record:
        """What :meth:`write` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(Row.from_json(row) for row in content["rows"])
        skipped = tuple(
            Skipped(**entry | {"shape": entry["shape"] and tuple(entry["shape"])})
            for entry in content.get("skipped", ())
        )
        return cls(Environment(**content["environment"]), rows, skipped)
