"""Names the trick that explains how a wrong result differs from the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchkiln.judge.blocks import POISON
from torchkiln.testing.compare import bits

WRONG = "wrong values"
UNWRITTEN, CONSTANT, CACHED = "unwritten output", "constant result", "cached result"
IDENTITY, LATE, PRECISION = "returns its input", "late result", "precision below the dtype"
SKIPPED, META = "part skipped", "wrong shape or dtype"

NARROW = 2.0**-4
"""Largest error, relative to the row, that rounding to a narrower dtype explains."""
MOST_PART = 0.95
"""Largest share of wrong elements of a result of which a part was computed."""
LEAST_ROUNDED = 0.02
"""Least share of wrong elements of a result that is rounded to a narrower dtype."""


def name_of(
    found: Sequence[Tensor],
    truth: Sequence[Tensor],
    inputs: Sequence[Tensor],
    earlier: Sequence[Sequence[Tensor]],
) -> str:
    """The trick behind a wrong result.

    Args:
        found: The outputs of the candidate.
        truth: The outputs in float64.
        inputs: The tensors of the call.
        earlier: Outputs of earlier calls with other inputs.
    """
    pairs = list(zip(found, truth, strict=False))
    if len(found) != len(truth) or any(y.shape != z.shape for y, z in pairs):
        return META
    same = [all(map(equal, found, old)) for old in earlier if len(old) == len(found)]
    wrong = [is_wrong(y, z) for y, z in pairs]
    rounded = (is_rounded(y, z, w) for (y, z), w in zip(pairs, wrong, strict=True))
    known: tuple[tuple[str, Callable[[], bool]], ...] = (
        (UNWRITTEN, lambda: any(bool(unwritten(y).any()) for y in found)),
        (CONSTANT, lambda: any(y.numel() > 1 and bool((y == y.flatten()[0]).all()) for y in found)),
        (CACHED, lambda: any(same)),
        (IDENTITY, lambda: any(equal(y, x) for y in found for x in inputs)),
        (PRECISION, lambda: all(rounded)),
        (SKIPPED, lambda: any(map(is_part, wrong))),
    )
    return next((name for name, holds in known if holds()), WRONG)


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are bitwise equal."""
    same = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return same and torch.equal(bits(one), bits(other))


def unwritten(y: Tensor) -> Tensor:
    """Elements whose bytes all equal ``POISON``, the value of unwritten memory."""
    if not y.numel():
        return torch.zeros(0, dtype=torch.bool)
    return (bits(y).reshape(-1, y.itemsize) == POISON).all(1)


def is_wrong(y: Tensor, truth: Tensor) -> Tensor:
    """Elements whose distance from the truth exceeds 64 rounding errors."""
    size = truth.abs() + _row_size(truth)
    eps = torch.finfo(y.dtype).eps if y.is_floating_point() else 0.0
    return ~((y.double() - truth).abs() <= 64 * eps * size) & truth.isfinite()


def _row_size(truth: Tensor) -> Tensor:
    size = torch.nan_to_num(truth, nan=0.0, posinf=0.0, neginf=0.0)
    return size.square().mean(-1, keepdim=True).sqrt() if size.dim() and size.numel() else size


def is_rounded(y: Tensor, truth: Tensor, wrong: Tensor) -> bool:
    """Whether small errors are in many elements, and no large one in any."""
    finite = y.isfinite() & truth.isfinite()
    size = (truth.abs() + _row_size(truth))[finite]
    error = (y.double() - truth).abs()[finite]
    many = bool(wrong.any()) and float(wrong.double().mean()) >= LEAST_ROUNDED
    return many and bool((error <= NARROW * size).all())


def is_part(wrong: Tensor) -> bool:
    """Whether wrong and right elements are in separate slices along an axis."""
    share = float(wrong.double().mean()) if wrong.numel() else 0.0
    if not 0.0 < share < MOST_PART:
        return False
    for d in range(wrong.dim()):
        slices = wrong.transpose(0, d).reshape(wrong.shape[d], -1).double().mean(1)
        if bool(((slices == 0) | (slices > 0.5)).all()) and int((slices == 0).sum()) > 0:
            return True
    return False
