"""Determinism of repeated calls, and of forward passes that a checkpoint repeats."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchkiln.testing.check import check
from torchkiln.testing.compare import (
    Where,
    gradients,
    outputs,
    require_gradients,
    require_identical,
    require_same,
    require_values,
    vector_jacobian,
)
from torchkiln.testing.contract.gradients import incoming
from torchkiln.testing.sample import FLOATING, Result
from torchkiln.testing.spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

RUNS = 20
"""Runs of the typical and the largest sample; other samples run less often."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A context with ``count`` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@check(dtypes=FLOATING)
def determinism(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Output and gradients are bitwise equal in each run.

    The output is also bitwise equal for any number of threads.
    """
    samples = list(spec.samples(device, dtype, requires_grad=True))
    often = {0, max(range(len(samples)), key=lambda i: samples[i].numel)}
    for index, sample in enumerate(samples):
        where = Where(spec, "determinism", sample)
        wanted = spec.wanted(sample)
        expected: Result | None = None
        counts = (1, 2, 3) if device.type == "cpu" else (1,)
        counts = counts[-1:] if spec.threads_matter else counts
        for count in counts:
            with threads(count):
                first: tuple[Tensor, ...] | None = None
                for _ in range(RUNS if index in often and count == counts[-1] else 2):
                    result = sample.call(spec.op)
                    grads = vector_jacobian(spec.op, sample, wanted, incoming(spec, result))
                    expected = result if expected is None else expected
                    first = grads if first is None else first
                    place = where.at(f"{count} threads")
                    require_same(result, expected, place)
                    for i, (one, other) in enumerate(zip(grads, first, strict=True)):
                        require_identical(one, other, place.at(f"gradient of argument {wanted[i]}"))


@check(needs="differentiable")
def checkpointed(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """In an activation checkpoint, eager and compiled, an equal seed gives equal bits again."""
    sample = spec.typical(device, dtype)
    wanted = spec.wanted(sample)

    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(spec.op, *args, use_reentrant=False, **kwargs)

    torch.compiler.reset()
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    for name, function in (("eager", again), ("compiled", compiled)):
        where = Where(spec, "checkpointed", sample).at(name)
        before: tuple[Result, tuple[Tensor, ...]] | None = None
        for _ in range(3):
            leaves = spec.leaves(sample)
            leaves.start_generators()
            args, kwargs = leaves.arguments(spec.op)
            result = function(*args, **kwargs)
            results = outputs(result)
            grads = gradients(results, leaves.take(wanted), incoming(spec, results))
            if before is None:
                require_values(results, sample, where)
                require_gradients(grads, sample, wanted, incoming(spec, results), where)
                before = results, grads
            require_same(results, before[0], where)
            for i, (one, other) in enumerate(zip(grads, before[1], strict=True)):
                require_identical(one, other, where.at(f"gradient of argument {wanted[i]}"))
