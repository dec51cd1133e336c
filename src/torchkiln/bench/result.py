"""Results: rows, calls that were skipped, and the JSON file of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from torchkiln._report import Report
from torchkiln.bench.case import BenchCase
from torchkiln.bench.clock import Load, Times, rounded
from torchkiln.bench.roofline import PRODUCT
from torchkiln.cli.options import json_lines, write_whole
from torchkiln.testing.environment import Environment

OURS = "torchkiln"
CALLS, SWEEP, ROWS, SMALL, HOST = "calls", "sweep", "rows", "small", "host"
NO_MEMORY = "out of memory"

NOISY, NOISY_HOST = 0.1, 0.5
"""Spread above which a row is marked as noisy. Host times are minima, which noise changes less."""


@dataclass(frozen=True)
class Measurement:
    """The times of one call of one op, ours and the peers', from one run."""

    kind: str
    """``calls`` (single, large), ``sweep`` (row lengths), ``rows`` (numbers of rows), ``small`` (in
    a CUDA graph) or ``host``."""
    op: str
    variant: str
    """Difference from the usual call of this shape; mostly empty."""
    dtype: str
    shape: tuple[int, int]
    direction: str
    """``forward``, ``backward``, or ``recorded``: a forward that records a graph."""
    threads: int | None
    """CPU threads; none on a GPU."""
    bytes: int
    """The minimum number of bytes to move."""
    operations: int
    """Arithmetic operations, as the op's spec counts them."""
    times: Mapping[str, Times]
    """Times of torchkiln and of the peers."""
    references: Mapping[str, Times] = field(default_factory=dict)
    """Copy, read and product of as much work; for host times, two ops of torch."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Peers that could not be timed, and why."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Peers that compute something else, with a description: shown, but not compared."""
    peaks: Mapping[str, int] = field(default_factory=dict)
    """Peak of allocated bytes, for torchkiln and the peers. Backward includes its forward."""

    @classmethod
    def of(
        cls,
        kind: str,
        case: BenchCase,
        direction: str,
        times: Mapping[str, Times],
        *,
        references: Iterable[str],
        missing: Mapping[str, str],
        remarks: Mapping[str, str] | None = None,
        threads: int | None = None,
        peaks: Mapping[str, int] | None = None,
    ) -> Measurement:
        """The row of a case; ``references`` are the names in ``times`` that are not peers."""
        beside = tuple(references)
        return cls(
            kind=kind,
            op=case.spec.name,
            variant=case.variant,
            dtype=str(case.dtype).removeprefix("torch."),
            shape=case.shape,
            direction=direction,
            threads=threads,
            bytes=case.moved(direction),
            operations=case.computed(direction),
            times={name: found for name, found in times.items() if name not in beside},
            references={name: times[name] for name in beside},
            missing=missing,
            remarks={name: words for name, words in (remarks or {}).items() if name in times},
            peaks=peaks or {},
        )

    @property
    def ours(self) -> Times:
        """The times of the op itself."""
        return self.times[OURS]

    @property
    def ceiling(self) -> float | None:
        """Seconds that the device needs to move the bytes or compute the operations."""
        if self.kind == HOST or not self.references:
            return None
        seconds = {name: times.seconds for name, times in self.references.items()}
        computing = seconds.pop(PRODUCT, 0.0)
        return max(min(seconds.values(), default=0.0), computing)

    @property
    def share(self) -> float | None:
        """Ceiling divided by our time; 1 is the speed of the ceiling."""
        return None if self.ceiling is None else self.ceiling / self.ours.seconds

    @property
    def rate(self) -> float:
        """Gigabytes per second for the minimum number of bytes."""
        return self.bytes / self.ours.seconds / 1e9

    @property
    def best_peer(self) -> str | None:
        """The fastest peer that computes the same result."""
        beside = {OURS, *self.remarks}
        peers = {name: t.seconds for name, t in self.times.items() if name not in beside}
        return min(peers, key=peers.__getitem__) if peers else None

    @property
    def speedup(self) -> float | None:
        """Time of the best peer divided by ours."""
        best = self.best_peer
        return None if best is None else self.times[best].seconds / self.ours.seconds

    @property
    def is_noisy(self) -> bool:
        """Whether our times, or the times of the best peer, spread too far to be reliable."""
        limit = NOISY_HOST if self.kind == HOST else NOISY
        compared = (OURS, self.best_peer or OURS)
        return max(self.times[name].spread for name in compared) > limit

    def as_dict(self) -> dict[str, Any]:
        """The fields that are not empty, and the figures that follow from them."""
        derived: dict[str, Any] = {
            "ceiling": self.ceiling,
            "share": self.share,
            "gb_per_s": self.rate,
            "best_peer": self.best_peer,
            "speedup": self.speedup,
            "is_noisy": self.is_noisy,
        }
        for name, value in derived.items():
            derived[name] = rounded(value, 4) if isinstance(value, float) else value
        return {k: v for k, v in (asdict(self) | derived).items() if v not in (None, "", {})}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Measurement:
        """The row that :meth:`as_dict` returned."""
        values: dict[str, Any] = {"variant": "", "threads": None}
        values |= {name: entry[name] for name in cls.__dataclass_fields__ if name in entry}
        values["shape"] = tuple(values["shape"])
        for name in {"times", "references"} & values.keys():
            values[name] = {key: Times(**value) for key, value in values[name].items()}
        return cls(**values)


@dataclass(frozen=True)
class Skipped:
    """A call that was not measured, and why; the run continues."""

    kind: str
    op: str
    dtype: str
    shape: tuple[int, int] | None
    direction: str | None
    reason: str

    @property
    def call(self) -> str:
        """Op, dtype, shape, direction and kind."""
        shape = f"{self.shape[0]} x {self.shape[1]}" if self.shape else ""
        words = [self.op, self.dtype, shape, self.direction or "", self.kind]
        return " ".join(word for word in words if word)

    def __str__(self) -> str:
        """The call and the reason, in one line."""
        return f"skipped {self.call}: {self.reason}"


def reason_of(error: Exception) -> str | None:
    """The reason to skip a call: no memory, or refused by the op; None for other errors."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    if (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "can't allocate memory" in words[0]
    ):
        return NO_MEMORY
    if isinstance(error, RuntimeError | ValueError) and words[0].startswith("torchkiln."):
        return words[0]
    return None


@dataclass(frozen=True)
class Record(Report):
    """A run: machine, rows and skipped calls. Times are seconds."""

    schema: ClassVar[str] = "torchkiln.bench/1"

    environment: Environment
    rows: tuple[Measurement, ...]
    skipped: tuple[Skipped, ...] = ()
    load: Load | None = None

    def as_dict(self) -> dict[str, Any]:
        """All rows and the machine, in JSON types."""
        return {
            "schema": self.schema,
            "environment": asdict(self.environment),
            "load": self.load and asdict(self.load),
            "rows": [row.as_dict() for row in self.rows],
            "skipped": [asdict(entry) for entry in self.skipped],
        }

    def write(self, path: Path) -> None:
        """Write a JSON file with a line for each row."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json_lines(self.as_dict()))

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read the file that :meth:`write` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        if (schema := content.get("schema")) != cls.schema:
            raise ValueError(f"schema: got {schema!r}, expected {cls.schema!r}")
        skipped = tuple(
            Skipped(**entry | {"shape": entry["shape"] and tuple(entry["shape"])})
            for entry in content["skipped"]
        )
        load = content["load"]
        return cls(
            Environment(**content["environment"]),
            tuple(map(Measurement.from_dict, content["rows"])),
            skipped,
            load and Load(**load),
        )

    def warnings(self) -> list[str]:
        """Sentences about a busy machine and noisy rows; none for a quiet run."""
        found = [str(self.load)] if self.load is not None and self.load.is_busy else []
        noisy = sum(row.is_noisy for row in self.rows)
        if noisy:
            found.append(
                f"{noisy} of {len(self.rows)} rows are marked !: their times, or the best peer's, "
                f"spread by more than {NOISY:.0%} (host times: {NOISY_HOST:.0%}); measure again on "
                "a quiet machine"
            )
        return found
