"""What is called: samples of a spec, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchkiln.bench.clock import Call
from torchkiln.testing import SPECS, OpSpec, Sample

FORWARD, BACKWARD, RECORDED = "forward", "backward", "recorded"

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class BenchCase:
    """A call of one op that is worth a row of its own."""

    spec: OpSpec
    variant: str
    sample: Sample
    dtype: torch.dtype
    shape: tuple[int, int]

    def moved(self, direction: str) -> int:
        """The least bytes that the call has to move."""
        backward = direction == BACKWARD
        traffic = self.spec.backward_traffic if backward else self.spec.traffic
        return traffic(self.sample).bytes


def cases(
    spec: OpSpec, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[BenchCase]:
    """The call of ``spec.bench`` and those of ``spec.bench_variants``, one at a time in memory."""
    yield BenchCase(spec, "", spec.bench(device, dtype, shape), dtype, shape)
    variants = getattr(spec, "bench_variants", None)
    if variants is not None:
        for label, sample in variants(device, dtype, shape):
            yield BenchCase(spec, label, sample, dtype, shape)


def named(ops: list[str]) -> list[OpSpec]:
    """The specs of these ops; all of them for an empty list."""
    known = {spec.name: spec for spec in SPECS}
    for op in ops:
        if op not in known:
            raise ValueError(
                f"torchkiln.bench: OP: got {op!r}, expected one of {', '.join(known)}; "
                "leave it out to time all of them"
            )
    return [known[op] for op in ops] or list(SPECS)


def call_of(
    case: BenchCase, function: Function, direction: str, grad: Tensor | None = None
) -> Call:
    """The call to be timed. A partial: a lambda around it would show in host times."""
    sample = case.sample
    if direction == FORWARD:
        return partial(function, *sample.args, **sample.kwargs)
    leaves = case.spec.leaves(sample)
    if direction == RECORDED:
        return partial(function, *leaves.args, **leaves.kwargs)
    inputs = [leaves.args[i] for i in case.spec.wanted(leaves)]
    output = leaves.call(function)
    incoming = torch.randn_like(output) if grad is None else grad
    return partial(torch.autograd.grad, output, inputs, incoming, retain_graph=True)
