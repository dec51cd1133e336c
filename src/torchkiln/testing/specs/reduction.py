"""The contracts of the reductions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.compare import depth
from torchkiln.testing.data import normal
from torchkiln.testing.derive import results
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec

# Shapes and dimensions: rows of every kind that kernels treat differently (a few elements, aligned
# and not, up to several blocks), columns (vectors of every width, folded, few rows), batches of
# both, and dimensions that take several steps.
SHAPES: Mapping[str, tuple[tuple[int, ...], Any]] = (
    {"typical": ((6, 10), 1), "all": ((6, 10), None), "no dimension named": ((6, 10), ())}
    | {"columns": ((6, 10), 0), "one": ((1,), 0), "0-dim": ((), None)}
    | {"0-dim, dimension named": ((), -1), "no rows": ((0, 5), 1), "one of size 1": ((4, 1, 5), 1)}
    | {"prime": ((7, 13), -1), "vector less one": ((9, 127), 1), "vector": ((9, 128), 1)}
    | {"vector and one": ((9, 129), 1), "tiny rows": ((301, 3), 1), "tiny even rows": ((301, 4), 1)}
    | {"narrow columns": ((301, 3), 0), "narrow even columns": ((301, 4), 0)}
    | {"odd columns": ((300, 33), 0), "images": ((2, 3, 5, 7), (0, 2, 3))}
    | {"images, all but one": ((2, 3, 5, 7), (0, 1, -1)), "images, ends": ((2, 3, 5, 7), (0, 3))}
    | {"middle": ((5, 6, 7), 1), "rank 9": ((2, 1, 2, 3, 1, 2, 1, 2, 3), (0, 3, 8))}
    | {"long row": ((140001,), None), "long rows": ((3, 70001), 1), "long columns": ((70001, 3), 0)}
    | {"wide columns": ((70, 2049), 0), "batch": ((7, 300, 5), 1)}
    | {"long narrow columns": ((1017, 10), 0)}
)


# The sum of no elements is 0. The mean is NaN, and torch's opcheck would report NaN as a
# difference.
OF_NOTHING: dict[str, tuple[tuple[int, ...], Any]] = {
    "empty": ((0,), None),
    "no rows to sum": ((0, 5), 0),
    "empty in the middle": ((3, 0, 2), (0, 1)),
}


def sum_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The calls of sum and mean, and sums of no elements."""
    yield from inputs(device, dtype)
    for name, (shape, dim) in OF_NOTHING.items():
        yield Sample(name, (normal("x", shape, device, dtype),), {"dim": dim})


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape and dimension, then with each dtype of the result."""
    for name, (shape, dim) in SHAPES.items():
        yield Sample(name, (normal("x", shape, device, dtype),), {"dim": dim})
    x = normal("x", (4, 5, 6), device, dtype)
    yield Sample("defaults", (x,))
    yield Sample("kept", (x,), {"dim": (0, 2), "keepdim": True})
    yield Sample("all kept", (x,), {"dim": None, "keepdim": True})
    for out in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        yield Sample(f"to {out}", (x,), {"dim": 1, "dtype": out})


def invalid(name: str, device: torch.device) -> Iterator[Invalid]:
    """A call with a dimension that is named twice."""
    x = torch.ones(2, 4, device=device)
    good = GoodCall(getattr(torch.ops.torchkiln, name).default, Sample("good", (x,)))
    words = "dim: got dimension 1 twice in [1, -1], expected each once"
    yield good.changed(words, dim=(1, -1))


def exact(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``function`` without the argument ``dtype``, so that the truth is not rounded."""
    kwargs.pop("dtype", None)
    return function(x, *args, **kwargs)


def magnitude(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The sum or mean of the absolute values, times the error growth of a pairwise sum."""
    result = exact(function, x.abs(), *args, **kwargs)
    terms = x.numel() // max(result.numel(), 1)
    return result * depth(terms)


def backward_traffic(sample: Sample) -> Traffic:
    """Traffic of one copy of the incoming gradient; the result is an expanded view."""
    (out,) = results(SUM, sample)
    return Traffic(2 * out.nbytes, 0)


def spec(
    name: str,
    function: Callable[..., Tensor],
    samples: Callable[[torch.device, torch.dtype], Iterator[Sample]],
    *,
    integers: bool = False,
) -> OpSpec:
    """The contract of a reduction with torch's ``function`` as its reference."""
    return OpSpec(
        op=getattr(torchkiln, name),
        reference=functools.partial(exact, function),
        composite=function,
        magnitude=functools.partial(magnitude, function),
        inputs=samples,
        refusals=Refusals(dims={"dim": "x"}, integers=integers),
        invalid=functools.partial(invalid, name),
        large=None,
        operations=lambda sample: (sample.numel, 0),
        backward_traffic=backward_traffic,
        opaque=False,
    )


SUM = spec("sum", torch.sum, sum_inputs, integers=True)
MEAN = spec("mean", torch.mean, inputs)
