"""The contracts of the reductions."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.compare import depth
from torchkiln.testing.data import normal
from torchkiln.testing.spec import Invalid, OpSpec, Sample, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Dims = int | tuple[int, ...] | None

# Shapes and dimensions: rows of every kind that kernels treat differently (a few elements, aligned
# and not, up to several blocks), columns (vectors of every width, folded, few rows), batches of
# both, and dimensions that take several steps.
SHAPES: dict[str, tuple[tuple[int, ...], Dims]] = {
    "typical": ((6, 10), 1),
    "all": ((6, 10), None),
    "no dimension named": ((6, 10), ()),
    "columns": ((6, 10), 0),
    "one": ((1,), 0),
    "0-dim": ((), None),
    "0-dim, dimension named": ((), -1),
    "no rows": ((0, 5), 1),
    "one of size 1": ((4, 1, 5), 1),
    "prime": ((7, 13), -1),
    "vector less one": ((9, 127), 1),
    "vector": ((9, 128), 1),
    "vector and one": ((9, 129), 1),
    "tiny rows": ((301, 3), 1),
    "tiny even rows": ((301, 4), 1),
    "narrow columns": ((301, 3), 0),
    "narrow even columns": ((301, 4), 0),
    "odd columns": ((300, 33), 0),
    "images": ((2, 3, 5, 7), (0, 2, 3)),
    "images, all but one": ((2, 3, 5, 7), (0, 1, -1)),
    "images, ends": ((2, 3, 5, 7), (0, 3)),
    "middle": ((5, 6, 7), 1),
    "rank 9": ((2, 1, 2, 3, 1, 2, 1, 2, 3), (0, 3, 8)),
    "long row": ((140001,), None),
    "long rows": ((3, 70001), 1),
    "long columns": ((70001, 3), 0),
    "wide columns": ((70, 2049), 0),
    "batch": ((7, 300, 5), 1),
}


# Sums of nothing are 0. A mean of nothing is NaN, which torch's own opcheck takes for a difference.
OF_NOTHING: dict[str, tuple[tuple[int, ...], Dims]] = {
    "empty": ((0,), None),
    "no rows to sum": ((0, 5), 0),
    "empty in the middle": ((3, 0, 2), (0, 1)),
}


def sum_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Those of both, and sums of nothing."""
    yield from inputs(device, dtype)
    for name, (shape, dim) in OF_NOTHING.items():
        yield Sample(name, (normal("x", shape, device, dtype),), {"dim": dim})


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Shapes and dimensions, then the dtypes of the result."""
    for name, (shape, dim) in SHAPES.items():
        yield Sample(name, (normal("x", shape, device, dtype),), {"dim": dim})
    x = normal("x", (4, 5, 6), device, dtype)
    yield Sample("defaults", (x,))
    yield Sample("kept", (x,), {"dim": (0, 2), "keepdim": True})
    yield Sample("all kept", (x,), {"dim": None, "keepdim": True})
    for out in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        yield Sample(f"to {out}", (x,), {"dim": 1, "dtype": out})


def invalid(name: str, device: torch.device) -> Iterator[Invalid]:
    """Every refusal."""
    prefix = rf"torchkiln\.{name}: "
    x = torch.ones(2, 4, device=device)

    def case(title: str, x: object, error: type[Exception], message: str, **kwargs: Any) -> Invalid:
        return Invalid(title, (x,), error, prefix + message, kwargs)

    yield case("None", None, TypeError, r"x: got NoneType, expected a torch\.Tensor")
    yield case(
        "dimension too large",
        x,
        IndexError,
        "dim: got 2, expected a number from -2 to 1: x has 2 dimensions",
        dim=2,
    )
    yield case(
        "dimension too small",
        x,
        IndexError,
        "dim: got -3, expected a number from -2 to 1: x has 2 dimensions",
        dim=(0, -3),
    )
    yield case(
        "0-dim",
        x[0, 0],
        IndexError,
        "dim: got 1, expected a number from -1 to 0: x has 0 dimensions",
        dim=1,
    )
    yield case(
        "dimension twice",
        x,
        RuntimeError,
        r"dim: got dimension 1 twice in \[1, -1\], expected each once",
        dim=(1, -1),
    )
    floating = "expected one of float32, float64, float16, bfloat16"
    for dtype in (torch.int64, torch.bool, torch.complex64):
        said = str(dtype).removeprefix("torch.")
        yield case(f"{said} x", x.to(dtype), RuntimeError, f"x: got dtype {said}, {floating}")
        yield case(f"to {said}", x, RuntimeError, f"dtype: got {said}, {floating}", dtype=dtype)
    layout = r"got layout Sparse, expected Strided; call \.to_dense\(\) first"
    yield case("sparse", x.to_sparse(), RuntimeError, "x: " + layout)


def exact(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``function`` in the dtype of ``x``: of float64, a result that no ``dtype`` has rounded."""
    kwargs.pop("dtype", None)
    return function(x, *args, **kwargs)


def magnitude(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The sum, or mean, of the absolute values, at the depth of a pairwise sum of as many."""
    result = exact(function, x.abs(), *args, **kwargs)
    terms = x.numel() // max(result.numel(), 1)
    return result * depth(terms)


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """The sums of the rows."""
    return Sample("bench", (torch.randn(shape, device=device, dtype=dtype),), {"dim": -1})


def out_bytes(sample: Sample) -> int:
    """Bytes of the result, which one call on the meta device tells."""
    out = sample.map(lambda t: t.to("meta")).call(torch.sum)
    return int(out.numel()) * out.itemsize


def traffic(sample: Sample) -> Traffic:
    """Reads x, writes the result."""
    x = sample.args[0]
    return Traffic(x.numel() * x.itemsize + out_bytes(sample), x.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """The gradient is a view of the incoming one, which at most is read once and written once."""
    return Traffic(2 * out_bytes(sample), 0)


def spec(
    name: str,
    function: Callable[..., Tensor],
    samples: Callable[[torch.device, torch.dtype], Iterator[Sample]],
) -> OpSpec:
    """The contract of a reduction that does what torch's ``function`` does."""
    return OpSpec(
        name=name,
        op=getattr(torchkiln, name),
        overload=getattr(torch.ops.torchkiln, name).default,
        reference=functools.partial(exact, function),
        composite=function,
        magnitude=functools.partial(magnitude, function),
        inputs=samples,
        invalid=functools.partial(invalid, name),
        bench=bench,
        large=None,
        traffic=traffic,
        backward_traffic=backward_traffic,
        differentiable=(0,),
        opaque=False,
    )


SUM = spec("sum", torch.sum, sum_inputs)
MEAN = spec("mean", torch.mean, inputs)
