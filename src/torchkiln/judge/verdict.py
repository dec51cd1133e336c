"""The verdict of the judge about one candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchkiln.bench.report import duration
from torchkiln.cli.status import Status

SCHEMA = "torchkiln.judge/1"


@dataclass(frozen=True)
class Finding:
    """A reason why a candidate is refused."""

    trick: str
    evidence: str


@dataclass
class Verdict:
    """The result of :func:`torchkiln.judge.judge`."""

    candidate: str
    reference: str
    device: str
    findings: list[Finding] = field(default_factory=list)
    """Reasons to refuse the candidate, the most important first; empty if right and honest."""
    void: list[str] = field(default_factory=list)
    """Reasons why the problem cannot tell right from wrong: the candidate is not judged."""
    answers: dict[str, str] = field(default_factory=dict)
    """The lines of the screen: right, gradients, strides, dtypes, determinism, graph capture."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Median seconds of a call by name: candidate, eager, compiled, ceiling."""

    @property
    def accepted(self) -> bool:
        """Whether the candidate is right and honest."""
        return not self.void and not self.findings

    @property
    def status(self) -> Status:
        """The exit status of the command."""
        if self.void:
            return Status.WRONG_CALL
        return Status.DONE if self.accepted else Status.FOUND

    @property
    def tricks(self) -> tuple[str, ...]:
        """Names of the findings, each once."""
        return tuple(dict.fromkeys(one.trick for one in self.findings))

    @property
    def speedup(self) -> float | None:
        """Time of the eager reference over that of the candidate; None if it was not measured.

        It is not measured if the clock is too coarse for the candidate.
        """
        is_measured = {"candidate", "eager"} <= self.seconds.keys() and "clock" not in self.answers
        if not self.accepted or not is_measured:
            return None
        return self.seconds["eager"] / self.seconds["candidate"]

    def add(self, trick: str, evidence: str) -> None:
        """Add a finding; only the first of each trick is kept."""
        if trick not in self.tricks:
            self.findings.append(Finding(trick, evidence))

    def as_dict(self) -> dict[str, Any]:
        """The fields in JSON types."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "accepted": self.accepted,
            "speedup": self.speedup,
        }

    def __str__(self) -> str:
        """The verdict as text that fits on one screen."""
        lines = [f"{self.candidate} for {self.reference}, on {self.device}"]
        lines += [f"  {name + '?':<15}{text}" for name, text in self.answers.items()]
        if self.seconds:
            times = ", ".join(f"{name} {duration(s)}" for name, s in self.seconds.items())
            gain = f"; {self.speedup:.2f} x as fast as eager" if self.speedup else ""
            lines.append(f"  {'time':<15}{times}{gain}")
        if self.void:
            lines += [
                f"  NOT JUDGED: this problem cannot tell right from wrong, because {words}"
                for words in self.void
            ]
        elif self.accepted:
            lines.append("  ACCEPTED: right, and no trick was found")
        else:
            lines += [f"  REFUSED: {one.trick}: {one.evidence}" for one in self.findings]
            lines.append(f"  Fix first: {self.findings[0].trick}.")
        return "\n".join(lines)


def fast_p(verdicts: Sequence[Verdict], p: float) -> float:
    """The share of verdicts that accept a candidate more than ``p`` times as fast as eager.

    This is the score of KernelBench, over verdicts of this judge: a candidate that is refused, or
    that was not timed, counts as slow. Problems that cannot be judged do not count.
    """
    judged = [one for one in verdicts if not one.void]
    if not judged:
        return 0.0
    return sum((one.speedup or 0.0) > p for one in judged) / len(judged)
