"""Measures one call: on large tensors, on few elements in CUDA graphs, on the host, its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from torchkiln.bench import peers
from torchkiln.bench.case import (
    BACKWARD,
    FORWARD,
    RECORDED,
    STEP,
    BenchCase,
    Function,
    call_of,
    cases,
)
from torchkiln.bench.clock import Call, Clock, HostClock, Times, in_turns
from torchkiln.bench.result import CALLS, HOST, OURS, SMALL, Measurement
from torchkiln.bench.roofline import Work, ceilings, written
from torchkiln.testing import OpSpec
from torchkiln.testing.compare import outputs
from torchkiln.testing.contract.repeat import threads
from torchkiln.testing.memory import allocated_bytes

HOST_SHAPE = (4, 64)
HOST_ROUNDS = 7

GRAPH_CALLS = 128
SMALL_SHAPES = tuple((2**power // 256, 256) for power in (10, 12, 14, 16, 18, 20))

Gauge = Callable[[Call], int]
"""Makes a call and returns the peak of its memory, in bytes."""


@dataclass(frozen=True)
class Settings:
    """Choices that hold for every row of a run."""

    clock: Clock
    peers: tuple[str, ...] = peers.PEERS
    budget: float = 3.0
    """Seconds for the measurements of one row; preparation comes on top."""
    gauge: Gauge | None = None
    """Measures the memory of large calls; None for no such measurement."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Peers that are not timed, with the reason."""


@dataclass(frozen=True)
class Prepared:
    """Warm calls of the op and its peers, one per case."""

    calls: Mapping[str, list[Call]]
    result_bytes: int
    missing: Mapping[str, str]
    remarks: Mapping[str, str]


def prepare(batch: list[BenchCase], direction: str, names: tuple[str, ...]) -> Prepared:
    """Calls of the op and its peers on each case of a batch; cases differ only in their tensors.

    A peer that fails is missing from the row; an op that fails is an error.
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
        except Exception as error:  # peers and compilers may raise any error
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
    kind: str = CALLS,
) -> Measurement | None:
    """The row of one large call with ``count`` CPU threads; none for a call that moves no bytes."""
    size = case.moved(direction)
    # There is nothing to time: backward may return the incoming gradient, for example.
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
    return Measurement.of(
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


def time_host(
    spec: OpSpec,
    device: torch.device,
    dtype: torch.dtype,
    names: tuple[str, ...],
    *,
    clock: HostClock | None = None,
    left_out: Mapping[str, str] | None = None,
) -> Iterator[Measurement]:
    """Rows of host times of calls on 4 x 64 elements: without and with recording a graph."""
    case = next(cases(spec, device, dtype, HOST_SHAPE))
    for direction in (FORWARD, RECORDED) if spec.differentiable else (FORWARD,):
        with peers.backward_may_repeat():
            prepared = prepare([case], direction, names)
            calls = {name: batch[0] for name, batch in prepared.calls.items()}
            beside = host_references(device, dtype, direction)
            chosen = clock or HostClock(device)
            measured = in_turns(chosen, calls | beside, float("inf"), rounds=HOST_ROUNDS)
        yield Measurement.of(
            HOST,
            case,
            direction,
            {name: Times.of(values, best=True) for name, values in measured.items()},
            references=beside,
            missing={**prepared.missing, **(left_out or {})},
        )


def host_references(device: torch.device, dtype: torch.dtype, direction: str) -> dict[str, Call]:
    """Two ops of torch on 4 x 64 elements, for comparison between machines."""
    x = torch.randn(HOST_SHAPE, device=device, dtype=dtype, requires_grad=direction == RECORDED)
    return {
        "torch.add": lambda: torch.add(x, x),
        "F.layer_norm": lambda: F.layer_norm(x, HOST_SHAPE[1:]),
    }


def time_small(
    spec: OpSpec,
    device: torch.device,
    dtype: torch.dtype,
    settings: Settings,
    *,
    shape: tuple[int, int],
    direction: str,
) -> Measurement | None:
    """The row of a small call on a GPU, timed in a CUDA graph of many calls.

    The time of a single call of a few microseconds would include the gaps around it; in a graph the
    kernels run one after another without the host. Each call has separate tensors, so that no data
    is in the L2 cache, which is flushed before the graph. Calls that move no bytes have no row.
    """
    batch = [next(cases(spec, device, dtype, shape)) for _ in range(GRAPH_CALLS)]
    size = batch[0].moved(direction)
    if size == 0:
        return None
    # A failed capture leaves torch's allocator in capture mode, so these peers are not tried.
    waiting = {
        name: "waits for the GPU, which a CUDA graph cannot"
        for name in settings.peers
        if peers.waits(name, batch[0])
    }
    names = tuple(name for name in settings.peers if name not in waiting)
    # Backward runs on the stream of its forward, so forward runs on the captured stream.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with peers.backward_may_repeat(), torch.cuda.stream(stream):
        prepared = prepare(batch, direction, names)
        work = Work(size, batch[0].computed(direction), dtype)
        beside = [ceilings(work, prepared.result_bytes, device) for _ in batch]
        references = {name: [calls[name] for calls in beside] for name in beside[0]}
        for calls in references.values():
            calls[0]()
    torch.cuda.synchronize(device)
    graphs: dict[str, Call] = {}
    missing = {**prepared.missing, **waiting, **settings.left_out}
    for name, calls in {**prepared.calls, **references}.items():
        try:
            graphs[name] = captured(calls, stream)
        except Exception as error:  # peers may raise any error
            if name == OURS or name in references:
                raise
            missing[name] = f"{type(error).__name__} in a CUDA graph"
    measured = in_turns(settings.clock, graphs, settings.budget)
    return Measurement.of(
        SMALL,
        batch[0],
        direction,
        {name: Times.of([v / GRAPH_CALLS for v in values]) for name, values in measured.items()},
        references=references,
        missing=missing,
        remarks=prepared.remarks,
    )


def captured(calls: list[Call], stream: torch.cuda.Stream) -> Call:
    """A call that replays all of ``calls``, each with a separate result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = [call() for call in calls]  # held, so that no result reuses another's memory
    del results
    return graph.replay


class CudaGauge:
    """Peak of the bytes that one call allocates, above the bytes allocated before it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, call: Call) -> int:
        """Peak memory of one call in bytes, results included."""
        before = allocated_bytes(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        return torch.cuda.max_memory_allocated(self.device) - before


def peaks(case: BenchCase, direction: str, names: tuple[str, ...], gauge: Gauge) -> dict[str, int]:
    """Peaks of the op and its peers: a forward without gradients, or a forward and its backward.

    Inputs and incoming gradients are not counted. Functions are made again, because torch.compile
    takes more memory for a function whose graph is retained, as in the timing. A peer that fails
    has no peak; the row has the reason.
    """
    moment = FORWARD if direction == FORWARD else STEP
    found = {OURS: gauge(call_of(case, case.spec.op, moment))}
    for name, make in peers.makers(case, names):
        try:
            call = call_of(peers.own_tensors(name, case), make(case), moment)
            call()  # warms up
            found[name] = gauge(call)
        except Exception:  # peers and compilers may raise any error
            continue
    return found
