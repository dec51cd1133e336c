"""The contract of OPNAME, from which its tests and benchmarks are derived."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torchkiln.testing import GoodCall, Invalid, OpSpec, Refusals, Sample, normal, steps

from PACKAGE import OPNAME

# The first is the typical call. The others reach other code paths: no rows, no columns, rows
# shorter than a tile, of one tile, and of several tiles.
SHAPES: dict[str, tuple[int, ...]] = {
    "typical": (6, 10),
    "one row": (37,),
    "one column": (41, 1),
    "no rows": (0, 5),
    "no columns": (5, 0),
    "tile": (3, 2048),
    "tile and one": (3, 2049),
    "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3),
    "many rows": (4099, 3),
}


def reference(x: Tensor, window: int = 4) -> Tensor:
    """The formula. Results of the op are compared with it in float64."""
    padded = F.pad(x, (window - 1, 0))
    columns = x.shape[-1]
    return sum((padded.narrow(-1, at, columns) for at in range(window)), torch.zeros_like(x))


def magnitude(x: Tensor, window: int = 4) -> Tensor:
    """The size of the rounding errors: the sum of the magnitudes, times the additions."""
    return reference(x.abs(), window) * steps(window)


def gradient_magnitude(x: Tensor, window: int = 4) -> Tensor:
    """A function whose gradients are the scale of the rounding errors of the op's gradients."""
    return reference(x, window) * steps(window)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Valid calls."""
    for name, shape in SHAPES.items():
        yield Sample(name, (normal("x", shape, device, dtype),), {"window": 3})
    x = normal("x", (3, 300), device, dtype)
    yield Sample("defaults", (x,))
    yield Sample("by position", (x, 1))
    yield Sample("longer than a row", (x[:, :20], 33))
    yield Sample("long", (normal("x", (2, 700), device, dtype), 400))


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls that the op refuses, in addition to calls derived from the schema."""
    x = torch.ones(2, 4, device=device)
    good = GoodCall(torch.ops.PACKAGE.OPNAME.default, Sample("good", (x,)))
    words = "x: got a 0-dimensional tensor, expected at least 1 dimension"
    yield good.changed(words, x=x[0, 0])
    yield good.changed("window: got 0, expected at least 1", ValueError, window=0)


SPEC = OpSpec(
    op=OPNAME,
    reference=reference,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    refusals=Refusals(),
    invalid=invalid,
    operations=(4, 4),
    opaque=True,
    helpers=("OPNAME_backward",),
)

SPECS = (SPEC,)
