"""What the op is judged by: its formula in plain torch, calls, refusals, bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torchkiln.testing import Invalid, OpSpec, Sample, Traffic
from torchkiln.testing.data import normal

from PACKAGE import OPNAME

# The first is the typical call; the others have every shape that takes a path of its own.
SHAPES: dict[str, tuple[int, ...]] = {
    "typical": (6, 10),
    "one": (1,),
    "0-dim": (),
    "empty": (3, 0, 2),
    "prime": (7, 13),
    "vector and one": (129,),
    "images": (2, 3, 5, 7),
    "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3),
    "threads": (257, 521),
}


def reference(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """The formula; the truth where the tensors are float64."""
    return x * torch.sigmoid(scale * gate)


def magnitude(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """Sizes of the terms that are rounded: a relative error of scale * gate moves the sigmoid."""
    return reference(x.abs(), gate, scale) * (1 + (scale * gate.detach()).abs())


def gradient_magnitude(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """A function whose gradients are the sizes of the terms of the gradients."""
    z = scale * gate.detach()
    s = torch.sigmoid(z)
    of_gate = x.detach().abs() * s * (1 + z.abs()) * abs(scale)
    return x * s * (1 + z.abs()) + gate * of_gate


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Shapes, and other scales."""
    for name, shape in SHAPES.items():
        pair = normal("x", shape, device, dtype), normal("gate", shape, device, dtype)
        yield Sample(name, pair, {"scale": 1.7})
    pair = normal("x", (9, 21), device, dtype), normal("gate", (9, 21), device, dtype)
    yield Sample("defaults", pair)
    yield Sample("by position", (*pair, -0.5))


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Every refusal."""
    x = torch.ones(2, 4, device=device)

    def case(name: str, x: Tensor, gate: Tensor, message: str) -> Invalid:
        return Invalid(name, (x, gate), RuntimeError, rf"PACKAGE\.OPNAME: {message}")

    known = "expected one of float32, float64, float16, bfloat16"
    yield case("integers", x.long(), x.long(), f"x: got dtype int64, {known}")
    yield case("dtypes", x, x.half(), "gate: got dtype float16, expected float32, the dtype of x")
    shapes = r"gate: got shape \[2, 3\], expected \[2, 4\], the shape of x"
    yield case("shapes", x, x[:, :3], shapes)
    sparse = r"x: got layout Sparse, expected Strided; call \.to_dense\(\) first"
    yield case("sparse", x.to_sparse(), x, sparse)
    devices = f"gate: got device meta, expected {x.device}, the device of x"
    yield case("devices", x, x.to("meta"), devices)


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """Two matrices."""
    pair = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    return Sample("bench", tuple(pair), {"scale": 1.7})


def traffic(sample: Sample) -> Traffic:
    """Reads x and gate, writes the output."""
    x = sample.args[0]
    return Traffic(3 * x.numel() * x.itemsize, 4 * x.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """Reads the incoming gradient, x and gate, writes two gradients."""
    x = sample.args[0]
    return Traffic(5 * x.numel() * x.itemsize, 8 * x.numel())


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
    backward_traffic=backward_traffic,
    differentiable=(0, 1),
    opaque=True,
    helpers=("OPNAME_backward",),
)

SPECS = (SPEC,)
