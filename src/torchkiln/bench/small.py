"""Rows of small calls on a GPU: time per call in a CUDA graph of many.

A single call of a few microseconds is timed with the gaps around it. In a graph the kernels follow
one another without the host. Every call has tensors of its own, so that none finds its data in the
L2 cache, which is flushed before the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchkiln.bench import peers
from torchkiln.bench.bench_case import cases
from torchkiln.bench.ceiling import Work, ceilings
from torchkiln.bench.clock import Call, Times, in_turns
from torchkiln.bench.measure import Prepared, Settings, prepare
from torchkiln.bench.row import OURS, Row
from torchkiln.testing import OpSpec

CALLS = 128
COLUMNS = 256
SHAPES = tuple((2**power // COLUMNS, COLUMNS) for power in (10, 12, 14, 16, 18, 20))


def captured(calls: list[Call], stream: torch.cuda.Stream) -> Callable[[], None]:
    """A call that replays all of ``calls``, each with a result of its own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = [call() for call in calls]  # held, so that none takes the memory of another
    del results
    return graph.replay


def graphs(
    prepared: Prepared, references: dict[str, list[Call]], stream: torch.cuda.Stream
) -> tuple[dict[str, Call], dict[str, str]]:
    """A graph of each, and the peers that cannot be captured."""
    found: dict[str, Call] = {}
    missing = dict(prepared.missing)
    for name, calls in {**prepared.calls, **references}.items():
        try:
            found[name] = captured(calls, stream)
        except Exception as error:  # whatever a peer raises
            if name == OURS or name in references:
                raise
            missing[name] = f"{type(error).__name__} in a CUDA graph"
    return found, missing


def time_small(
    spec: OpSpec,
    device: torch.device,
    dtype: torch.dtype,
    settings: Settings,
    *,
    shape: tuple[int, int],
    direction: str,
) -> Row | None:
    """The row of one call; none where nothing is moved."""
    batch = [next(cases(spec, device, dtype, shape)) for _ in range(CALLS)]
    size = batch[0].moved(direction)
    if size == 0:
        return None
    # A failed capture leaves torch's allocator in the middle of it, so these are not tried.
    waiting = {
        name: "waits for the GPU, which a CUDA graph cannot"
        for name in settings.peers
        if peers.waits(name, batch[0])
    }
    names = tuple(name for name in settings.peers if name not in waiting)
    # A backward runs on the stream of its forward, which has to be the one that is captured.
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
    replays, missing = graphs(prepared, references, stream)
    measured = in_turns(settings.clock, replays, settings.budget)
    return Row.of(
        "small",
        batch[0],
        direction,
        {name: Times.of([v / CALLS for v in values]) for name, values in measured.items()},
        references=references,
        missing={**missing, **waiting, **settings.left_out},
        remarks=prepared.remarks,
    )
