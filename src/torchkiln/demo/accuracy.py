"""Errors against float64, ours and torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchkiln.testing import SPECS, OpSpec, Sample
from torchkiln.testing.compare import (
    Where,
    exact,
    outputs,
    require_gradients,
    require_values,
    vector_jacobian,
    widened,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True)
class Errors:
    """The largest errors of one op over all samples, in units of the dtype's rounding step."""

    op: str
    dtype: torch.dtype
    what: str
    ours: float
    torch: float
    samples: int
    complaint: str | None


def steps(found: Tensor, truth: Tensor, terms: Tensor, dtype: torch.dtype) -> float:
    """The largest error beside the largest value, in rounding steps of the coarser dtype.

    Where the values are nothing but what cancellation has left of their ``terms``, beside those.
    """
    if found.numel() == 0:
        return 0.0
    largest = torch.maximum(truth.abs().max(), terms.abs().max())
    largest = largest.clamp(min=torch.finfo(found.dtype).tiny)
    step = max(torch.finfo(found.dtype).eps, torch.finfo(dtype).eps) * largest
    return float((found.double() - truth).abs().max() / step)


def complaint(judge: Callable[..., None], *args: object) -> str | None:
    """What the contract says against a result."""
    try:
        judge(*args)
    except AssertionError as error:
        return str(error)
    return None


def largest_steps(
    found: Iterable[Tensor],
    truth: Iterable[Tensor],
    terms: Iterable[Tensor],
    dtype: torch.dtype | None = None,
) -> float:
    """The largest of several tensors."""
    groups = zip(found, truth, terms, strict=True)
    return max(steps(f, exact, size, dtype or f.dtype) for f, exact, size in groups)


def worst(rows: Iterable[tuple[float, float, str | None]]) -> tuple[float, float, str | None, int]:
    """Largest errors, the first complaint, and how many rows there were."""
    ours, theirs, words = zip(*rows, strict=True)
    return max(ours), max(theirs), next((w for w in words if w), None), len(ours)


def forward(spec: OpSpec, sample: Sample) -> tuple[float, float, str | None]:
    """Our error, torch's, and the complaint about the output of one call."""
    found = sample.call(spec.op)
    truth = outputs(exact(spec, sample).call(spec.reference))
    terms = outputs(exact(spec, sample).call(spec.magnitude))
    words = complaint(require_values, found, sample, Where(spec, "values", sample))
    other = sample.call(spec.composite)
    ours, theirs = (largest_steps(outputs(result), truth, terms) for result in (found, other))
    return ours, theirs, words


def backward(spec: OpSpec, sample: Sample) -> tuple[float, float, str | None]:
    """The same for its gradients."""
    wanted = spec.wanted(sample)
    grads = list(map(torch.randn_like, outputs(sample.call(spec.op))))
    dtype = grads[0].dtype
    leaves = spec.leaves(sample)
    found = vector_jacobian(spec.op, leaves, wanted, grads)
    other = vector_jacobian(spec.composite, leaves, wanted, grads)
    wide = widened(grads)
    leaves = spec.leaves(exact(spec, sample))
    truth = vector_jacobian(spec.reference, leaves, wanted, wide)
    sizes = [None if grad is None else grad.abs() for grad in wide]
    terms = vector_jacobian(spec.gradient_magnitude or spec.reference, leaves, wanted, sizes)
    where = Where(spec, "gradients", sample)
    words = complaint(require_gradients, found, sample, wanted, grads, where)
    ours, theirs = (largest_steps(result, truth, terms, dtype) for result in (found, other))
    return ours, theirs, words


def all_errors(device: torch.device) -> list[Errors]:
    """Every op, dtype and direction."""
    table = []
    for spec in SPECS:
        for dtype in spec.dtypes:
            samples = list(spec.samples(device, dtype))
            for what, judge in (("forward", forward), ("backward", backward)):
                found = worst(judge(spec, sample) for sample in samples)
                ours, theirs, words, count = found
                table.append(Errors(spec.name, dtype, what, ours, theirs, count, words))
    return table
