"""Times of random calls and of eager torch, and a list of the calls that are slower.

A call counts as slower if it takes more than torch's time / :data:`LEAST` + :data:`SLACK`, and also
in a second measurement with more rounds. The host time of calls up to :data:`SMALL_BYTES` is
compared in the same way.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from torchkiln._report import Report
from torchkiln.bench.case import call_of
from torchkiln.bench.clock import Call, Clock, HostClock, Times, device_clock, in_turns
from torchkiln.bench.draws import Draw, drawn, key, text
from torchkiln.bench.peers import eager as eager_of
from torchkiln.bench.report import duration
from torchkiln.bench.result import reason_of
from torchkiln.testing import OpSpec
from torchkiln.testing.compare import outputs
from torchkiln.testing.environment import Environment, environment

LEAST = 0.95
SLACK = 1e-6
"""Seconds by which a call may exceed torch's time / :data:`LEAST`."""
SMALL_BYTES = 1 << 16
FIRST, AGAIN = 5, 25
"""Rounds of the first measurement, and of the second, which decides."""
HOST_CALLS = 50
TOO_LARGE = "takes more operations than a drawn call may"


@dataclass(frozen=True)
class Timed:
    """The times of one drawn call."""

    key: str
    """The seed and the number of the call."""
    op: str
    dtype: str
    direction: str
    layout: str
    bytes: int
    """Bytes of the tensors of the call."""
    seconds: float
    eager: float
    """Seconds of eager torch."""
    host: float | None
    """Host seconds of the call, for small calls."""
    eager_host: float | None
    call: str
    """The call as Python code; empty in a file if it is not slower, as the key draws it again."""

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Our time and torch's: on the device, and on the host where it was measured."""
        pairs = [(self.seconds, self.eager)]
        if self.host is not None and self.eager_host is not None:
            pairs.append((self.host, self.eager_host))
        return pairs

    @property
    def speedup(self) -> float:
        """Time of torch divided by ours: the smaller quotient of device and host."""
        return min(theirs / ours for ours, theirs in self.pairs)

    @property
    def is_slower(self) -> bool:
        """Whether the call is slower than torch by more than the limit."""
        return any(loses(*pair) for pair in self.pairs)

    def in_file(self) -> dict[str, Any]:
        """The fields for the line of a file."""
        return asdict(self) | ({} if self.is_slower else {"call": ""})

    def line(self) -> str:
        """A row of the list of slower calls."""
        times = ", host ".join(f"{duration(o)} / {duration(t)}" for o, t in self.pairs)
        return f"{self.speedup:.2f} x  {times}  {self.direction}  {self.call}"


@dataclass(frozen=True)
class Count:
    """How many calls an op had in one direction, how many were slower, and the speed-up."""

    op: str
    direction: str
    calls: int
    slower: int
    median: float
    """Median of the speed-ups."""

    @classmethod
    def of(cls, calls: Sequence[Timed], op: str = "", direction: str = "") -> Count:
        """Count the calls of an op in a direction, and the slower ones."""
        median = statistics.median(one.speedup for one in calls)
        slower = sum(one.is_slower for one in calls)
        return cls(op, direction, len(calls), slower, round(median, 3))


@dataclass(frozen=True)
class Summary:
    """The counts of a run and its slower calls, for a published file."""

    environment: dict[str, Any]
    total: Count
    counts: list[Count]
    slower: list[Timed]
    """The slower calls, worst first."""

    @classmethod
    def of(cls, environment: dict[str, Any], calls: Iterable[Timed]) -> Summary:
        """Summarise the calls of a run."""
        found: dict[tuple[str, str], list[Timed]] = {}
        for one in sorted(calls, key=lambda one: (one.op, one.direction)):
            found.setdefault((one.op, one.direction), []).append(one)
        every = [one for ones in found.values() for one in ones]
        counts = [Count.of(ones, *name) for name, ones in found.items()]
        return cls(environment, Count.of(every), counts, worst_first(every))

    @classmethod
    def read(cls, file: Path) -> Summary:
        """Read what :meth:`write` wrote."""
        first, total, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        counts = [Count(**line) for line in lines if "calls" in line]
        slower = [Timed(**line) for line in lines if "calls" not in line]
        return cls(first, Count(**total), counts, slower)

    def write(self, file: Path) -> None:
        """Write lines for the machine, the totals, each op and direction, and each slower call."""
        rows: list[Count | Timed] = [self.total, *self.counts, *self.slower]
        lines = [self.environment, *(asdict(row) for row in rows)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def worst_first(calls: Iterable[Timed]) -> list[Timed]:
    """The slower ones of these calls, worst first."""
    return sorted((one for one in calls if one.is_slower), key=lambda one: one.speedup)


def loses(ours: float, theirs: float) -> bool:
    """Whether a time is longer than allowed."""
    return ours > theirs / LEAST + SLACK


def best(clock: Clock, calls: Mapping[str, Call], *, least: bool = False) -> tuple[float, float]:
    """Seconds of both calls; measured again if ours would be slower."""
    found = (0.0, 0.0)
    for rounds in (FIRST, AGAIN):
        measured = in_turns(clock, calls, float("inf"), rounds)
        ours, theirs = (Times.of(values, best=least).seconds for values in measured.values())
        found = ours, theirs
        if not loses(ours, theirs):
            break
    return found


class EagerError(Exception):
    """Eager torch raised an error, so that there is nothing to compare with."""


def words_of(error: Exception) -> str:
    """The type of an error, and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def timed(draw: Draw) -> Timed:
    """Measure a drawn call."""
    case, direction = draw.case, draw.direction
    sample = case.sample
    device = sample.tensors[0].device
    results = outputs(sample.call(case.spec.op))
    grads = [torch.randn_like(result) for result in results]
    calls = {"ours": call_of(case, case.spec.op, direction, grads)}
    calls["ours"]()
    try:
        calls["eager"] = call_of(case, eager_of(case), direction, grads)
        calls["eager"]()
    except Exception as error:
        raise EagerError(reason_of(error) or f"eager torch raised: {words_of(error)}") from error
    seconds, eager = best(device_clock(device), calls)
    size = sum(tensor.nbytes for tensor in sample.tensors)
    host = eager_host = None
    if size <= SMALL_BYTES and device.type == "cuda":
        host, eager_host = best(HostClock(device, HOST_CALLS), calls, least=True)
    name = str(case.dtype).removeprefix("torch.")
    op = f"{case.spec.name} {case.variant}".strip()
    return Timed(
        *(draw.key, op, name, direction, draw.layout, size),
        *(seconds, eager, host, eager_host, text(draw)),
    )


@dataclass
class Run(Report):
    """The calls of a run with their times."""

    schema: ClassVar[str] = "torchkiln.fuzz/1"

    environment: Environment
    timed: list[Timed] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """The reasons of calls that were not made, by their keys."""
    failed: dict[str, str] = field(default_factory=dict)
    """The errors that our ops raised, with the calls, by their keys."""
    is_whole: bool = True
    """False if the time limit or Ctrl-C ended the run before the last call."""

    @property
    def slower(self) -> list[Timed]:
        """The slower calls, worst first."""
        return worst_first(self.timed)

    def as_dict(self) -> dict[str, Any]:
        """All calls, in types of JSON."""
        return {
            "schema": self.schema,
            "environment": asdict(self.environment),
            "is_whole": self.is_whole,
            "rows": [asdict(one) | {"is_slower": one.is_slower} for one in self.timed],
            "refused": [{"key": key, "reason": why} for key, why in self.refused.items()],
            "failed": [{"key": key, "reason": why} for key, why in self.failed.items()],
        }

    def summary(self) -> list[str]:
        """The slower calls, the calls that were not made or failed, and the counts."""
        slower, count = self.slower, len(self.timed)
        limit = f"{LEAST} x the speed of eager torch, and {duration(SLACK)} more"
        others = f"{len(self.refused)} left out, {len(self.failed)} failed"
        return [
            *(one.line() for one in slower),
            *(f"left out {key}: {reason}" for key, reason in self.refused.items()),
            *(f"failed {key}: {reason}" for key, reason in self.failed.items()),
            f"{len(slower)} of {count} calls are below {limit}; {others}",
        ]


def fuzz(
    specs: Sequence[OpSpec],
    device: torch.device,
    *,
    count: int,
    seed: int,
    seconds: float | None = None,
    file: Path | None = None,
) -> Run:
    """Time random calls; calls that are in ``file`` are read, other calls are added to it.

    The summary of the run is written to a file next to ``file``.
    """
    done = opened(file, device) if file is not None else {}
    run = Run(environment(device))
    start = time.perf_counter()
    try:
        for number in range(count):
            if seconds is not None and time.perf_counter() - start > seconds:
                run.is_whole = False
                break
            name = key(seed, number)
            one = done.get(name) or draw_and_time(run, specs, device, seed, number)
            if one is None:
                continue
            if file is not None and name not in done:
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(one.in_file()) + "\n")
            run.timed.append(one)
    except KeyboardInterrupt:
        run.is_whole = False
    if file is not None and run.timed:
        machine, _ = read(file)
        Summary.of(machine, run.timed).write(file.with_stem(f"{file.stem}_summary"))
    return run


def draw_and_time(
    run: Run, specs: Sequence[OpSpec], device: torch.device, seed: int, number: int
) -> Timed | None:
    """The times of a drawn call; None if it has none: then ``run`` has the reason."""
    name, draw = key(seed, number), None
    try:
        draw = drawn(specs, device, seed, number)
        if draw is not None:
            return timed(draw)
        run.refused[name] = TOO_LARGE
    except EagerError as error:
        run.refused[name] = str(error)
    except Exception as error:
        reason = reason_of(error)
        if reason is not None:
            run.refused[name] = reason
        else:
            call = f"  {draw.direction}  {text(draw)}" if draw is not None else ""
            run.failed[name] = words_of(error) + call
    return None


def opened(file: Path, device: torch.device) -> dict[str, Timed]:
    """The calls of an earlier run on the same machine; a new file gets its first line.

    The first line has the machine and the versions, every other line a call.
    """
    here = asdict(environment(device)) | {"date": None}
    if not file.exists():
        file.write_text(json.dumps(here) + "\n", encoding="utf-8")
        return {}
    found, calls = read(file)
    if found != here:
        other = [f"{name} {found.get(name)}" for name in here if found.get(name) != here[name]]
        raise ValueError(
            f"torchkiln.bench: --out: got the calls of {', '.join(other)} in {file}, expected a "
            "file of this machine and version; name another folder"
        )
    return {one.key: one for one in calls}


def read(file: Path) -> tuple[dict[str, Any], list[Timed]]:
    """The machine and the calls of a run."""
    first, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return first, [Timed(**line) for line in lines]
