"""Samples for ops on tensors of one shape."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torchkiln.testing.data import normal
from torchkiln.testing.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

# The first is the typical call. The others reach other code paths: no elements, a tail after the
# last vector, more dimensions than the kernels support, several threads or blocks.
SHAPES: dict[str, tuple[int, ...]] = {
    "typical": (6, 10),
    "0-dim": (),
    "empty": (3, 0, 2),
    "prime": (7, 13),
    "vector and one": (129,),
    "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3),
    "threads": (257, 521),
}


def alike(*names: str, **numbers: float) -> Callable[[torch.device, torch.dtype], Iterator[Sample]]:
    """A value for the field ``inputs``: calls with tensors of one shape and with numbers.

    Args:
        names: of the tensors, the first arguments of the op; each is filled with normal deviates.
        numbers: the other arguments by name. Samples pass them by name, by position, or not at all.
    """
    return partial(samples, names, numbers)  # a partial: a local function could not be pickled


def samples(
    names: Sequence[str],
    numbers: Mapping[str, float],
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[Sample]:
    """The calls that :func:`alike` describes."""

    def tensors(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(normal(name, shape, device, dtype) for name in names)

    for name, shape in SHAPES.items():
        yield Sample(name, tensors(shape), dict(numbers))
    if numbers:
        yield Sample("defaults", tensors((9, 21)))
        negative = (-0.3 * value for value in numbers.values())
        yield Sample("by position", (*tensors((9, 21)), *negative))
