"""The forms that all reports have for programs."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar


class Report(ABC):
    """A result that programs read, too."""

    schema: ClassVar[str]
    """Name and version of the form, such as ``torchkiln.replace/1``."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """The report in types that JSON has, with its ``schema``."""

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON, on one line or indented."""
        return json.dumps(self.as_dict(), indent=indent)
