"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was found, and the commands of which one mends it."""

    topic: str
    state: State
    words: str
    remedies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """A problem is one only where something can be done about it."""
        if self.state == "problem" and not self.remedies:
            raise ValueError(f"Finding: remedies: got none, expected one for: {self.words}")


def ok(topic: str, words: str) -> Finding:
    """As it should be."""
    return Finding(topic, "ok", words)


def note(topic: str, words: str, *remedies: str) -> Finding:
    """Nothing that keeps anything from running."""
    return Finding(topic, "note", words, remedies)


def problem(topic: str, words: str, *remedies: str) -> Finding:
    """Something to mend."""
    return Finding(topic, "problem", words, remedies)
