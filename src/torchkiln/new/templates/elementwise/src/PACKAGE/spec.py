"""The contract of OPNAME, from which its tests and benchmarks are derived."""

import torch
from torch import Tensor
from torchkiln.testing import OpSpec, Refusals, alike

from PACKAGE import OPNAME


def reference(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """The formula. Results of the op are compared with it in float64."""
    return x * torch.sigmoid(scale * gate)


def magnitude(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """The scale of rounding errors: a relative error of ``scale * gate`` moves the sigmoid."""
    return reference(x.abs(), gate, scale) * (1 + (scale * gate.detach()).abs())


def gradient_magnitude(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """A function whose gradients are the scale of the rounding errors of the op's gradients."""
    z = scale * gate.detach()
    s = torch.sigmoid(z) * (1 + z.abs())
    return x * s + gate * x.detach().abs() * s * abs(scale)


SPEC = OpSpec(
    op=OPNAME,
    reference=reference,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=alike("x", "gate", scale=1.7),
    refusals=Refusals(like={"gate": "x"}),
    operations=(4, 8),
    opaque=True,
    helpers=("OPNAME_backward",),
)

SPECS = (SPEC,)
