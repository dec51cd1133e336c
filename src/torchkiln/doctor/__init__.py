"""``torchkiln doctor``: where the ops run, what prevents them, and the command that helps.

Only the standard library is imported. Torch is examined without importing it, because torch itself
may be broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check of the doctor."""

    topic: str
    state: State
    words: str
    remedies: tuple[str, ...] = ()
    """Commands to type; any one of them helps."""

    def __post_init__(self) -> None:
        """Refuse a problem without a command to type."""
        if self.state == "problem" and not self.remedies:
            raise ValueError(f"Finding: remedies: got none, expected a command for: {self.words}")


def ok(topic: str, words: str) -> Finding:
    """Report a check that passed."""
    return Finding(topic, "ok", words)


def note(topic: str, words: str, *remedies: str) -> Finding:
    """Report a fact that needs no repair."""
    return Finding(topic, "note", words, remedies)


def problem(topic: str, words: str, *remedies: str) -> Finding:
    """Report a problem that must be repaired."""
    return Finding(topic, "problem", words, remedies)
