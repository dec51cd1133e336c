"""The contract of OPNAME, from which its tests and benchmarks are derived."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torchkiln.testing import GoodCall, Invalid, OpSpec, Refusals, Sample, depth, normal

from PACKAGE import OPNAME

# The first is the typical call. The others reach other code paths: no rows, no columns, rows for a
# warp and for a block, in vectors and in single elements.
SHAPES: dict[str, tuple[int, ...]] = {
    "typical": (6, 10),
    "one row": (37,),
    "no rows": (0, 5),
    "no columns": (5, 0),
    "vectors": (7, 128),
    "vectors and one": (7, 129),
    "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3),
    "many rows": (4099, 3),
    "long rows": (2, 20484),
    "long rows, no vectors": (3, 20481),
}


def reference(x: Tensor) -> Tensor:
    """The formula. Results of the op are compared with it in float64."""
    return (x * x).sum(-1)


def magnitude(x: Tensor) -> Tensor:
    """The scale of rounding errors, which grow with the depth of the sum."""
    return reference(x) * depth(x.shape[-1])


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Valid calls."""
    for name, shape in SHAPES.items():
        yield Sample(name, (normal("x", shape, device, dtype),))


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls that the op refuses, in addition to calls derived from the schema."""
    x = torch.ones(2, 4, device=device)
    good = GoodCall(torch.ops.PACKAGE.OPNAME.default, Sample("good", (x,)))
    words = "x: got a 0-dimensional tensor, expected at least 1 dimension"
    yield good.changed(words, x=x[0, 0])


SPEC = OpSpec(
    op=OPNAME,
    reference=reference,
    magnitude=magnitude,
    inputs=inputs,
    refusals=Refusals(),
    invalid=invalid,
    large=None,
    operations=lambda sample: (2 * sample.numel, 2 * sample.numel),
    opaque=True,
    helpers=("OPNAME_backward",),
)

SPECS = (SPEC,)
