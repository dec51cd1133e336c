"""The formats for programs that all reports share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar


class Report(ABC):
    """A result that programs can read."""

    schema: ClassVar[str]
    """Name and version of the format, such as ``torchkiln.replace/1``."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """The report in JSON types, with its ``schema``."""

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON, on one line or indented."""
        return json.dumps(self.as_dict(), indent=indent)
