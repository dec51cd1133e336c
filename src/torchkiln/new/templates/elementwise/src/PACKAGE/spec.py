"""The contract of OPNAME, from which its tests and benchmarks are derived."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torchkiln.testing import OpSpec, Refusals, Sample
from torchkiln.testing.data import normal

from PACKAGE import OPNAME

# The first is the typical call. The others take other paths: no elements, vectors with a rest,
# more dimensions than the kernels count, several threads or blocks.
SHAPES: dict[str, tuple[int, ...]] = {
    "typical": (6, 10),
    "0-dim": (),
    "empty": (3, 0, 2),
    "prime": (7, 13),
    "vector and one": (129,),
    "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3),
    "threads": (257, 521),
}


def reference(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """The formula. Results of the op are compared with it in float64."""
    return x * torch.sigmoid(scale * gate)


def magnitude(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """The scale of rounding errors: a relative error of ``scale * gate`` moves the sigmoid."""
    return reference(x.abs(), gate, scale) * (1 + (scale * gate.detach()).abs())


def gradient_magnitude(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """The same for gradients: those of this function are the scale of their rounding errors."""
    z = scale * gate.detach()
    s = torch.sigmoid(z) * (1 + z.abs())
    return x * s + gate * x.detach().abs() * s * abs(scale)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Valid calls."""
    for name, shape in SHAPES.items():
        pair = normal("x", shape, device, dtype), normal("gate", shape, device, dtype)
        yield Sample(name, pair, {"scale": 1.7})
    pair = normal("x", (9, 21), device, dtype), normal("gate", (9, 21), device, dtype)
    yield Sample("defaults", pair)
    yield Sample("by position", (*pair, -0.5))


SPEC = OpSpec(
    op=OPNAME,
    reference=reference,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    refusals=Refusals(like={"gate": "x"}),
    operations=(4, 8),
    opaque=True,
    helpers=("OPNAME_backward",),
)

SPECS = (SPEC,)
