"""The contracts of the pointwise family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.spec import Invalid, OpSpec, Sample, Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator

# Two shapes each: the scalar loop, the vector loop with every tail, broadcasting along either side
# and in the middle, more dimensions than collapse, and enough elements for several threads or
# blocks.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "typical": ((6, 10), (6, 10)),
    "one": ((1,), (1,)),
    "0-dim": ((), ()),
    "0-dim beside 1-D": ((), (5,)),
    "empty": ((0,), (0,)),
    "empty in the middle": ((3, 0, 2), (3, 1, 2)),
    "prime": ((17,), (17,)),
    "vector less one": ((127,), (127,)),
    "vector": ((128,), (128,)),
    "vector and one": ((129,), (129,)),
    "power of two less one": ((1023,), (1023,)),
    "power of two and one": ((1025,), (1025,)),
    "row": ((31, 33), (33,)),
    "column": ((31, 33), (31, 1)),
    "column beside vectors": ((31, 64), (31, 1)),
    "vectors, in the middle": ((4, 1, 32), (1, 3, 1)),
    "outer": ((13, 1), (1, 19)),
    "middle": ((4, 1, 5), (4, 3, 1)),
    "images": ((2, 3, 5, 7), (2, 3, 5, 7)),
    "images and channels": ((2, 3, 5, 7), (3, 1, 1)),
    "rank 9": ((2, 1, 2, 3, 1, 2, 1, 2, 3), (1, 2, 2, 1, 2, 2, 3, 1, 3)),
    "threads": ((257, 521), (257, 521)),
    "threads and row": ((257, 521), (521,)),
}


def add_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Pairs of shapes, then pairs of dtypes."""
    for name, (left, right) in SHAPES.items():
        yield Sample(name, (normal("a", left, device, dtype), normal("b", right, device, dtype)))
    a = normal("a", (5, 9), device, dtype)
    yield Sample("float32 on the right", (a, normal("b", (9,), device, torch.float32)))
    yield Sample("float64 on the left", (normal("b", (5, 9), device, torch.float64), a))
    yield Sample("int64 on the right", (a, torch.arange(-4, 5, device=device)))
    yield Sample("bool on the left", (torch.arange(9, device=device) % 2 == 0, a))
    yield Sample("0-dim float64 on the right", (a, normal("b", (), device, torch.float64)))
    yield Sample("0-dim on the CPU", (a, normal("b", (), torch.device("cpu"), dtype)))


def add_invalid(device: torch.device) -> Iterator[Invalid]:
    """Every refusal of add."""
    x = torch.ones(4, device=device)
    yield Invalid(
        "None", (x, None), TypeError, r"torchkiln\.add: b: got NoneType, expected a torch\.Tensor"
    )
    yield Invalid(
        "a number", (2.0, x), TypeError, r"torchkiln\.add: a: got float, expected a torch\.Tensor"
    )
    promoted = (
        r"torchkiln\.add: a, b: got dtypes {0} and {1}, which promote to {2}, "
        "expected one of float32, float64, float16, bfloat16"
    )
    for left, right, both in (
        (torch.int64, torch.int64, "int64"),
        (torch.int32, torch.bool, "int32"),
        (torch.bool, torch.bool, "bool"),
        (torch.float32, torch.complex64, "complex64"),
    ):
        names = [str(d).removeprefix("torch.") for d in (left, right)]
        yield Invalid(
            f"{names[0]} and {names[1]}",
            (x.to(left), x.to(right)),
            RuntimeError,
            promoted.format(*names, both),
        )
    sparse = torch.eye(4, device=device).to_sparse()
    dense = torch.ones(4, 4, device=device)
    layout = r"torchkiln\.add: {0}: got layout Sparse, expected Strided; call \.to_dense\(\) first"
    yield Invalid("sparse a", (sparse, dense), RuntimeError, layout.format("a"))
    yield Invalid("sparse b", (dense, sparse), RuntimeError, layout.format("b"))
    yield Invalid(
        "shapes",
        (x, torch.ones(3, device=device, requires_grad=True)),
        RuntimeError,
        r"torchkiln\.add: b: got shape \[3\], expected one that broadcasts with a of shape \[4\]",
    )
    yield Invalid(
        "meta beside real",
        (x, torch.ones(4, device="meta")),
        RuntimeError,
        rf"torchkiln\.add: b: got device meta, expected {x.device}, the device of a",
    )
    if device.type != "cpu":
        yield Invalid(
            "two devices",
            (x, torch.ones(4)),
            RuntimeError,
            rf"torchkiln\.add: b: got device cpu, expected {x.device}, the device of a",
        )


def add_bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """Two matrices of one shape."""
    a = torch.randn(shape, device=device, dtype=dtype)
    return Sample("bench", (a, torch.randn_like(a)))


def add_large(device: torch.device) -> Sample:
    """A matrix of more than 2**31 elements, twice: both are read linearly."""
    rows, columns = 2**16 + 1, 2**15 + 1
    a = torch.arange(rows, device=device).remainder(251).to(torch.bfloat16).unsqueeze(1)
    a = a.expand(rows, columns).contiguous()
    return Sample("large", (a, a))


def add_traffic(sample: Sample) -> Traffic:
    """Both inputs are read, the output written."""
    a, b = sample.args
    count = torch.broadcast_shapes(a.shape, b.shape).numel()
    size = torch.result_type(a, b).itemsize
    return Traffic(a.numel() * a.itemsize + b.numel() * b.itemsize + count * size, count)


def add_backward_traffic(sample: Sample) -> Traffic:
    """A gradient of an input that was not broadcast is the incoming one; others are sums of it."""
    a, b = sample.args
    shape = torch.broadcast_shapes(a.shape, b.shape)
    summed = [t for t in (a, b) if t.shape != shape]
    count = shape.numel()
    size = torch.result_type(a, b).itemsize
    moved = sum(count * size + t.numel() * t.itemsize for t in summed)
    return Traffic(moved, count * len(summed))


def add_magnitude(a: Tensor, b: Tensor) -> Tensor:
    """|a| + |b|."""
    return a.abs() + b.abs()


ADD = OpSpec(
    name="add",
    op=torchkiln.add,
    overload=torch.ops.torchkiln.add.default,
    reference=torch.add,
    composite=torch.add,
    magnitude=add_magnitude,
    inputs=add_inputs,
    invalid=add_invalid,
    bench=add_bench,
    large=add_large,
    traffic=add_traffic,
    backward_traffic=add_backward_traffic,
    differentiable=(0, 1),
    opaque=False,
)
