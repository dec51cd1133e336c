"""Rows of single large calls: the device's time, beside peers and ceilings in the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from torchkiln.bench import peers
from torchkiln.bench.bench_case import BACKWARD, STEP, BenchCase, Function, call_of
from torchkiln.bench.ceiling import Work, ceilings, written
from torchkiln.bench.clock import Call, Clock, Times, in_turns
from torchkiln.bench.memory import Gauge, peaks
from torchkiln.bench.row import OURS, Row
from torchkiln.testing.compare import outputs
from torchkiln.testing.contract.repeat import threads


@dataclass(frozen=True)
class Settings:
    """What holds for every row of a run."""

    clock: Clock
    peers: tuple[str, ...] = peers.PEERS
    budget: float = 3.0
    """Seconds for one row, its preparation not counted."""
    gauge: Gauge | None = None
    """What measures the memory of large calls, where that is wanted."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Peers that take no part, and why."""


@dataclass(frozen=True)
class Prepared:
    """Warm calls of everyone who takes part in a row."""

    calls: Mapping[str, list[Call]]
    result_bytes: int
    missing: Mapping[str, str]
    remarks: Mapping[str, str]


def prepare(batch: list[BenchCase], direction: str, names: tuple[str, ...]) -> Prepared:
    """Calls of the op and of its peers on each case, which differ in their tensors alone.

    A peer that cannot do the call, or cannot be built here, is missing from the row; an op that
    cannot is an error.
    """
    case = batch[0]
    results = outputs(case.sample.call(case.spec.op))
    grads = [
        [torch.randn_like(result) for result in results] if direction == BACKWARD else None
        for _ in batch
    ]
    known = [case.sample.args[i] for i in case.sample.positions] + (grads[0] or [])

    def calls_of(function: Function, name: str = OURS, moment: str = direction) -> list[Call]:
        return [
            call_of(peers.own_tensors(name, each), function, moment, incoming)
            for each, incoming in zip(batch, grads, strict=True)
        ]

    calls = {OURS: calls_of(case.spec.op)}
    size = written(calls[OURS][0](), known)
    missing: dict[str, str] = {}
    remarks: dict[str, str] = {}
    for name, make in peers.makers(case, names):
        remark = peers.remark(name, case, direction)
        try:
            theirs = calls_of(make(case), name, STEP if remark else direction)
            for call in theirs:
                call()
        except peers.Refused as refusal:
            missing[name] = str(refusal)
        except Exception as error:  # whatever a peer or a compiler raises
            first = next(iter(str(error).strip().splitlines()), "")
            missing[name] = f"{type(error).__name__}: {first}"
        else:
            calls[name] = theirs
            if remark:
                remarks[name] = remark
    return Prepared(calls, size, missing, remarks)


def time_case(
    case: BenchCase,
    direction: str,
    settings: Settings,
    count: int | None = None,
    *,
    kind: str = "calls",
) -> Row | None:
    """The row of one call with ``count`` CPU threads; none where nothing is moved."""
    size = case.moved(direction)
    # A gradient that is handed through takes no time that could be compared.
    if size == 0:
        return None
    device = case.sample.args[case.sample.positions[0]].device
    memory = peaks(case, direction, settings.peers, settings.gauge) if settings.gauge else {}
    with threads(count or torch.get_num_threads()), peers.backward_may_repeat():
        prepared = prepare([case], direction, settings.peers)
        work = Work(size, case.computed(direction), case.dtype)
        references = ceilings(work, prepared.result_bytes, device)
        calls = {name: batch[0] for name, batch in prepared.calls.items()}
        measured = in_turns(settings.clock, calls | references, settings.budget)
    return Row.of(
        kind,
        case,
        direction,
        {name: Times.of(values) for name, values in measured.items()},
        references=references,
        missing={**prepared.missing, **settings.left_out},
        remarks=prepared.remarks,
        threads=count,
        peaks=memory,
    )
