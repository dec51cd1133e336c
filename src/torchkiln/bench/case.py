"""The calls that are timed: samples of a spec, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchkiln.bench.clock import Call
from torchkiln.testing import SPECS, OpSpec, Sample, Traffic
from torchkiln.testing.compare import outputs
from torchkiln.testing.registry import find

FORWARD, BACKWARD = "forward", "backward"
RECORDED = "recorded"
"""A forward with inputs that require gradients."""
STEP = "step"
"""A recorded forward and its backward in one call."""

Function = Callable[..., Any]
"""Returns a tensor or a tuple of tensors."""


@dataclass(frozen=True)
class BenchCase:
    """One call of one op, which is timed for one row of the table."""

    spec: OpSpec
    variant: str
    sample: Sample
    dtype: torch.dtype
    shape: tuple[int, int]

    def moved(self, direction: str) -> int:
        """The minimum number of bytes that the call must move."""
        return self._traffic(direction).bytes

    def computed(self, direction: str) -> int:
        """The arithmetic operations of the call."""
        return self._traffic(direction).operations

    @property
    def wanted(self) -> tuple[int, ...]:
        """Positions of the arguments whose gradients are computed."""
        timed = self.spec.timed
        return tuple(i for i in self.spec.wanted(self.sample) if timed is None or i in timed)

    def _traffic(self, direction: str) -> Traffic:
        if direction == STEP:
            both = self._traffic(FORWARD), self._traffic(BACKWARD)
            return Traffic(sum(t.bytes for t in both), sum(t.operations for t in both))
        backward = direction == BACKWARD
        traffic = self.spec.backward_traffic if backward else self.spec.traffic
        return traffic(self.sample)


def cases(
    spec: OpSpec, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[BenchCase]:
    """The calls of ``spec.bench`` and ``spec.bench_variants``, one at a time in memory."""
    yield BenchCase(spec, "", spec.bench(device, dtype, shape), dtype, shape)
    if spec.bench_variants is not None:
        for label, sample in spec.bench_variants(device, dtype, shape):
            yield BenchCase(spec, label, sample, dtype, shape)


def named(ops: list[str], specs: Sequence[OpSpec] = SPECS) -> list[OpSpec]:
    """The specs of these ops; all specs for an empty list."""
    return [find("torchkiln.bench", "OP", op, specs) for op in ops] or list(specs)


def step(
    function: Function, leaves: Sample, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Forward and backward as in training, where backward frees the graph."""
    return torch.autograd.grad(outputs(leaves.call(function)), inputs, grads)


def call_of(
    case: BenchCase, function: Function, direction: str, grads: Sequence[Tensor] | None = None
) -> Call:
    """A call of ``function`` with the arguments of ``case``, ready for a clock.

    ``direction`` is FORWARD, BACKWARD, RECORDED or STEP. ``grads`` are the incoming gradients,
    random by default. Returns a partial, because the frame of a lambda would add host time.
    """
    sample = case.sample
    if direction == FORWARD:
        args, kwargs = sample.arguments(function)
        return partial(function, *args, **kwargs)
    wanted = case.wanted
    leaves = case.spec.leaves(sample, wanted)
    if direction == RECORDED:
        args, kwargs = leaves.arguments(function)
        return partial(function, *args, **kwargs)
    inputs = [leaves.args[i] for i in wanted]
    results = outputs(leaves.call(function))
    incoming = list(map(torch.randn_like, results)) if grads is None else grads
    # A peer's result may have another dtype; the conversion must not be timed.
    incoming = [g.to(r.dtype) for g, r in zip(incoming, results, strict=True)]
    if direction == STEP:
        return partial(step, function, leaves, inputs, incoming)
    return partial(torch.autograd.grad, results, inputs, incoming, retain_graph=True)
