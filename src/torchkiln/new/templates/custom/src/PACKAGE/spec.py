"""What the op is judged by: its formula in plain torch, calls, refusals, bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torchkiln.testing import Invalid, OpSpec, Sample, Traffic
from torchkiln.testing.compare import steps
from torchkiln.testing.data import normal

from PACKAGE import OPNAME

# The first is the typical call; the others have every shape that takes a path of its own: rows of
# less than a tile, of a tile, of several.
SHAPES: dict[str, tuple[int, ...]] = {
    "typical": (6, 10),
    "one": (1,),
    "one row": (37,),
    "one column": (41, 1),
    "no rows": (0, 5),
    "no columns": (5, 0),
    "tile": (3, 2048),
    "tile and one": (3, 2049),
    "runs": (2, 1025),
    "images": (2, 3, 5, 7),
    "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3),
    "many rows": (4099, 3),
}


def reference(x: Tensor, window: int = 4) -> Tensor:
    """The formula; the truth where the tensors are float64."""
    padded = F.pad(x, (window - 1, 0))
    columns = x.shape[-1]
    return sum((padded.narrow(-1, at, columns) for at in range(window)), torch.zeros_like(x))


def magnitude(x: Tensor, window: int = 4) -> Tensor:
    """Sizes of the terms that are rounded, one after the other."""
    return reference(x.abs(), window) * steps(window)


def gradient_magnitude(x: Tensor, window: int = 4) -> Tensor:
    """A function whose gradients are the sizes of the terms of the gradients."""
    return reference(x, window) * steps(window)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Shapes, and other windows."""
    for name, shape in SHAPES.items():
        yield Sample(name, (normal("x", shape, device, dtype),), {"window": 3})
    x = normal("x", (3, 300), device, dtype)
    yield Sample("defaults", (x,))
    yield Sample("by position", (x, 1))
    yield Sample("longer than a row", (x[:, :20], 33))
    yield Sample("long", (normal("x", (2, 700), device, dtype), 400))


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Every refusal."""
    x = torch.ones(2, 4, device=device)
    prefix = r"PACKAGE\.OPNAME: "

    def case(name: str, x: Tensor, message: str) -> Invalid:
        return Invalid(name, (x,), RuntimeError, f"{prefix}x: {message}")

    known = "expected one of float32, float64, float16, bfloat16"
    yield case("integers", x.long(), f"got dtype int64, {known}")
    yield case("0-dim", x[0, 0], r"got shape \[\], expected \[\.\.\., columns\]")
    sparse = r"got layout Sparse, expected Strided; call \.to_dense\(\) first"
    yield case("sparse", x.to_sparse(), sparse)
    window = f"{prefix}window: got 0, expected at least 1"
    yield Invalid("window", (x,), ValueError, window, {"window": 0})


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A matrix."""
    return Sample("bench", (torch.randn(shape, device=device, dtype=dtype),))


def traffic(sample: Sample) -> Traffic:
    """Reads x, writes as much."""
    x = sample.args[0]
    return Traffic(2 * x.numel() * x.itemsize, 4 * x.numel())


SPEC = OpSpec(
    name="OPNAME",
    op=OPNAME,
    overload=torch.ops.PACKAGE.OPNAME.default,
    reference=reference,
    composite=reference,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    invalid=invalid,
    bench=bench,
    large=None,
    traffic=traffic,
    backward_traffic=traffic,
    differentiable=(0,),
    opaque=True,
    helpers=("OPNAME_backward",),
)

SPECS = (SPEC,)
