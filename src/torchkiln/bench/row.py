"""One line of the benchmark's tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchkiln.bench.bench_case import BenchCase
from torchkiln.bench.ceiling import PRODUCT
from torchkiln.bench.clock import Times

OURS = "torchkiln"


@dataclass(frozen=True)
class Row:
    """The times of one call of one op, ours and others', from one run."""

    kind: str
    """``calls`` (single, large), ``sweep`` (of row lengths), ``small`` (in a CUDA graph) or
    ``host``."""
    op: str
    variant: str
    """What sets the call apart from the usual one of its shape; mostly empty."""
    dtype: str
    shape: tuple[int, int]
    direction: str
    """``forward``, ``backward``, or ``recorded``: a forward that a backward may follow."""
    threads: int | None
    """CPU threads; none on a GPU."""
    bytes: int
    """The least that has to be moved."""
    operations: int
    """On numbers, as the op's spec counts them."""
    times: Mapping[str, Times]
    """Ours and the peers'."""
    references: Mapping[str, Times] = field(default_factory=dict)
    """Ceilings that no op can beat, or well-known ops of torch beside host times."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Peers that could not be timed, and why."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Peers whose call does something else, and what: they are shown, but not compared with."""
    peaks: Mapping[str, int] = field(default_factory=dict)
    """Bytes allocated at the same time, ours and the peers'; backward counts its forward, too."""

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
    ) -> Row:
        """The row of a case, from the times of everyone; ``references`` names those of no peer."""
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
        """Our own times."""
        return self.times[OURS]

    @property
    def floor(self) -> float | None:
        """Seconds that the device needs to move as many bytes, or to compute as much."""
        if self.kind == "host" or not self.references:
            return None
        seconds = {name: times.seconds for name, times in self.references.items()}
        computing = seconds.pop(PRODUCT, 0.0)
        return max(min(seconds.values(), default=0.0), computing)

    @property
    def share(self) -> float | None:
        """How much of the ceiling is reached; 1 is all of it."""
        return None if self.floor is None else self.floor / self.ours.seconds

    @property
    def rate(self) -> float:
        """Gigabytes per second of the least that has to be moved."""
        return self.bytes / self.ours.seconds / 1e9

    @property
    def best_peer(self) -> str | None:
        """The fastest of the others that do the same."""
        beside = {OURS, *self.remarks}
        peers = {name: t.seconds for name, t in self.times.items() if name not in beside}
        return min(peers, key=peers.__getitem__) if peers else None

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the best peer."""
        best = self.best_peer
        return None if best is None else self.times[best].seconds / self.ours.seconds

    def to_json(self) -> dict[str, Any]:
        """The fields, and for readers of the file what follows from them."""
        derived = {
            "floor": self.floor,
            "share": self.share,
            "gb_per_s": self.rate,
            "best_peer": self.best_peer,
            "speedup": self.speedup,
        }
        return asdict(self) | derived

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Row:
        """The row that :meth:`to_json` wrote."""
        values = {name: entry[name] for name in cls.__dataclass_fields__ if name in entry}
        values["shape"] = tuple(values["shape"])
        values.setdefault("operations", 0)  # files of the first version have none
        for name in ("times", "references"):
            values[name] = {key: Times(**value) for key, value in values[name].items()}
        return cls(**values)
