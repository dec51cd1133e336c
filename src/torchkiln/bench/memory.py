"""How much memory a call takes on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchkiln.bench import peers
from torchkiln.bench.bench_case import BACKWARD, FORWARD, STEP, BenchCase, call_of
from torchkiln.bench.clock import Call
from torchkiln.bench.row import OURS

Gauge = Callable[[Call], int]


class CudaGauge:
    """Bytes that one call allocates at the same time, above what was allocated before it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, call: Call) -> int:
        """Make the call; its results count until it has returned."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        return torch.cuda.max_memory_allocated(self.device) - before


def peaks(case: BenchCase, direction: str, names: tuple[str, ...], gauge: Gauge) -> dict[str, int]:
    """Of the op and of its peers: a forward without gradients, or forward and backward in one.

    Inputs and incoming gradients are there before the call. Functions are made anew, because what
    is timed keeps its graph for another backward, and torch.compile would take more for that.
    A peer that fails has no peak; the row says why.
    """
    moment = STEP if direction == BACKWARD else FORWARD
    found = {OURS: gauge(call_of(case, case.spec.op, moment))}
    for name, make in peers.makers(case, names):
        try:
            call = call_of(peers.own_tensors(name, case), make(case), moment)
            call()  # warm
            found[name] = gauge(call)
        except Exception:  # whatever a peer or a compiler raises
            continue
    return found
