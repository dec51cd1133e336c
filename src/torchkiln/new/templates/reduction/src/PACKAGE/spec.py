"""What the op is judged by: its formula in plain torch, calls, refusals, bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torchkiln.testing import Invalid, OpSpec, Sample, Traffic
from torchkiln.testing.compare import depth
from torchkiln.testing.data import normal

from PACKAGE import OPNAME

# The first is the typical call; the others have every shape that takes a path of its own: rows of
# a warp and of a block, with and without whole vectors.
SHAPES: dict[str, tuple[int, ...]] = {
    "typical": (6, 10),
    "one": (1,),
    "one row": (37,),
    "one column": (41, 1),
    "no rows": (0, 5),
    "no columns": (5, 0),
    "vectors": (7, 128),
    "vectors and one": (7, 129),
    "images": (2, 3, 5, 7),
    "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3),
    "many rows": (4099, 3),
    "long rows": (2, 20484),
    "long rows of no vectors": (3, 20481),
}


def reference(x: Tensor) -> Tensor:
    """The formula; the truth where the tensors are float64."""
    return (x * x).sum(-1)


def magnitude(x: Tensor) -> Tensor:
    """Sizes of the terms that are rounded, at the depth of a sum of as many."""
    return reference(x) * depth(x.shape[-1])


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Shapes."""
    for name, shape in SHAPES.items():
        yield Sample(name, (normal("x", shape, device, dtype),))


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Every refusal."""
    x = torch.ones(2, 4, device=device)

    def case(name: str, x: Tensor, message: str) -> Invalid:
        return Invalid(name, (x,), RuntimeError, rf"PACKAGE\.OPNAME: x: {message}")

    known = "expected one of float32, float64, float16, bfloat16"
    yield case("integers", x.long(), f"got dtype int64, {known}")
    yield case("0-dim", x[0, 0], r"got shape \[\], expected \[\.\.\., columns\]")
    sparse = r"got layout Sparse, expected Strided; call \.to_dense\(\) first"
    yield case("sparse", x.to_sparse(), sparse)


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A matrix."""
    return Sample("bench", (torch.randn(shape, device=device, dtype=dtype),))


def traffic(sample: Sample) -> Traffic:
    """Reads x, writes a number for each row."""
    x = sample.args[0]
    return Traffic((x.numel() + x[..., 0].numel()) * x.itemsize, 2 * x.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """Reads x and the incoming gradient, writes the gradient."""
    x = sample.args[0]
    return Traffic((2 * x.numel() + x[..., 0].numel()) * x.itemsize, 2 * x.numel())


SPEC = OpSpec(
    name="OPNAME",
    op=OPNAME,
    overload=torch.ops.PACKAGE.OPNAME.default,
    reference=reference,
    composite=reference,
    magnitude=magnitude,
    inputs=inputs,
    invalid=invalid,
    bench=bench,
    large=None,
    traffic=traffic,
    backward_traffic=backward_traffic,
    differentiable=(0,),
    opaque=True,
    helpers=("OPNAME_backward",),
)

SPECS = (SPEC,)
