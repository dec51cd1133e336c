"""Rows that could not be measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_MEMORY = "out of memory"


@dataclass(frozen=True)
class Skipped:
    """What was left out, and why; the rest of the run goes on."""

    kind: str
    op: str
    dtype: str
    shape: tuple[int, int] | None
    direction: str | None
    reason: str

    def __str__(self) -> str:
        """One line."""
        shape = f"{self.shape[0]} x {self.shape[1]}" if self.shape else ""
        words = [self.op, self.dtype, shape, self.direction or "", self.kind]
        return f"skipped {' '.join(word for word in words if word)}: {self.reason}"


def reason_of(error: Exception) -> str | None:
    """Why the call at hand cannot be made here; none where something is broken."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    if (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "can't allocate memory" in words[0]
    ):
        return f"{NO_MEMORY}: {words[0]}"
    # Refused by the op itself: a shape that it does not take.
    if isinstance(error, RuntimeError | ValueError) and words[0].startswith("torchkiln."):
        return words[0]
    return None
