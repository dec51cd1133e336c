"""The results of the demo, for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torchkiln._report import Report

if TYPE_CHECKING:
    from pathlib import Path

    from torchkiln.bench import Environment, Measurement
    from torchkiln.bench.result import Skipped
    from torchkiln.demo.accuracy import Errors
    from torchkiln.demo.train import Outcome


@dataclass(frozen=True)
class Results(Report):
    """The results of all parts of the demo."""

    schema: ClassVar[str] = "torchkiln.demo/1"

    environment: Environment
    errors: tuple[Errors, ...]
    rows: tuple[Measurement, ...]
    skipped: tuple[Skipped, ...]
    training: Outcome
    picture: Path | None

    @property
    def wrong(self) -> list[str]:
        """A sentence for each wrong result."""
        found = [row.complaint for row in self.errors if row.complaint]
        if not self.training.agree:
            found.append("the two trainings disagree, or did not learn")
        return found

    def as_dict(self) -> dict[str, Any]:
        """All results, in types of JSON."""
        return {
            "schema": self.schema,
            "environment": asdict(self.environment),
            "errors": [row.as_dict() for row in self.errors],
            "rows": [row.as_dict() for row in self.rows],
            "skipped": [asdict(entry) for entry in self.skipped],
            "training": self.training.as_dict(),
            "picture": self.picture and str(self.picture),
            "wrong": self.wrong,
        }
