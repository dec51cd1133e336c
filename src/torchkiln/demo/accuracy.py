"""Errors of torchkiln and of eager torch against float64."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

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
from torchkiln.testing.contract.repeat import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Judged = tuple[float, float, str | None]
"""Errors of torchkiln and of eager torch, and the contract's message if ours is too large."""


@dataclass(frozen=True)
class Errors:
    """The largest errors of one op over all samples, in rounding steps of the dtype."""

    op: str
    dtype: torch.dtype
    direction: str
    ours: float
    torch: float
    samples: int
    complaint: str | None

    def as_dict(self) -> dict[str, Any]:
        """All fields, in types of JSON."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


def steps(found: Tensor, truth: Tensor, terms: Tensor, dtypes: Iterable[torch.dtype]) -> float:
    """The largest error of an element, in rounding steps.

    A call may mix dtypes, so the step is that of the coarsest dtype among ``dtypes`` and the
    result. It is taken at the larger of the true element and ``terms``, because the rounding errors
    of the terms remain when the terms cancel.
    """
    if found.numel() == 0:
        return 0.0
    infos = [torch.finfo(dtype) for dtype in (found.dtype, *dtypes)]
    # Terms are infinite where a mask or a weight removes them from the result.
    scale = torch.where(terms.isfinite(), torch.maximum(truth.abs(), terms.abs()), truth.abs())
    step = max(info.eps for info in infos) * scale.clamp(min=max(info.tiny for info in infos))
    error = (found.double() - truth).abs() / step
    return float(torch.where(truth.isfinite(), error, 0.0).max())


def complaint(judge: Callable[..., None], *args: object) -> str | None:
    """The failure that a check of the contract raises, if any."""
    try:
        judge(*args)
    except AssertionError as error:
        return str(error)
    return None


def largest_steps(
    found: Iterable[Tensor],
    truth: Iterable[Tensor],
    terms: Iterable[Tensor],
    dtypes: Sequence[torch.dtype],
) -> float:
    """The largest error of several tensors."""
    groups = zip(found, truth, terms, strict=True)
    return max(steps(f, exact, size, dtypes) for f, exact, size in groups)


def forward(spec: OpSpec, sample: Sample, dtype: torch.dtype) -> Judged:
    """Errors of the outputs of one call."""
    found = sample.call(spec.op)
    truth = outputs(exact(spec, sample).call(spec.reference))
    terms = outputs(exact(spec, sample).call(spec.magnitude))
    words = complaint(require_values, found, sample, Where(spec, "values", sample))
    other = sample.call(spec.composite)
    ours, theirs = (largest_steps(outputs(r), truth, terms, [dtype]) for r in (found, other))
    return ours, theirs, words


def backward(spec: OpSpec, sample: Sample, dtype: torch.dtype) -> Judged:
    """Errors of the gradients of one call."""
    wanted = spec.wanted(sample)
    grads = list(map(torch.randn_like, outputs(sample.call(spec.op))))
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
    dtypes = [dtype, *(grad.dtype for grad in grads)]
    ours, theirs = (largest_steps(r, truth, terms, dtypes) for r in (found, other))
    return ours, theirs, words


def all_errors(device: torch.device) -> Iterator[Errors]:
    """Errors of every op, dtype and direction.

    Runs on one CPU thread: the calls are small, and more threads do not change the results.
    """
    for spec in SPECS:
        for dtype in spec.dtypes:
            samples = list(spec.samples(device, dtype))
            for direction, judge in (("forward", forward), ("backward", backward)):
                with threads(1):
                    judged = [judge(spec, sample, dtype) for sample in samples]
                ours, theirs, words = zip(*judged, strict=True)
                first = next((w for w in words if w), None)
                yield Errors(
                    spec.name, dtype, direction, max(ours), max(theirs), len(judged), first
                )
