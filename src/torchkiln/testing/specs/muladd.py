"""The contract of muladd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.spec import Invalid, OpSpec, Sample, Traffic
from torchkiln.testing.specs.activation import SPARSE

if TYPE_CHECKING:
    from collections.abc import Iterator

# Three shapes each: all alike with every vector tail, broadcasting of one, two and all, more
# dimensions than collapse, and enough elements for several threads or blocks.
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
SHAPES: dict[str, Shapes] = {
    "typical": ((6, 10), (6, 10), (6, 10)),
    "one": ((1,), (1,), (1,)),
    "0-dim": ((), (), ()),
    "empty": ((0,), (0,), (0,)),
    "empty in the middle": ((3, 0, 2), (3, 1, 2), (2,)),
    "prime": ((17,), (17,), (17,)),
    "vector less one": ((127,), (127,), (127,)),
    "vector": ((128,), (128,), (128,)),
    "vector and one": ((129,), (129,), (129,)),
    "power of two and one": ((1025,), (1025,), (1025,)),
    "scale and shift of columns": ((31, 33), (33,), (33,)),
    "scale and shift of rows": ((31, 33), (31, 1), (31, 1)),
    "outer and matrix": ((13, 1), (1, 19), (13, 19)),
    "all broadcast": ((4, 1, 1), (3, 1), (5,)),
    "images and channels": ((2, 3, 5, 7), (3, 1, 1), (3, 1, 1)),
    "rank 9": (
        (2, 1, 2, 3, 1, 2, 1, 2, 3),
        (1, 2, 2, 1, 2, 2, 3, 1, 3),
        (2, 1, 1, 3, 2, 1, 3, 2, 1),
    ),
    "scalars": ((5, 7), (), ()),
    "scalar factor": ((5, 7), (), (5, 7)),
    "scalar first": ((), (5, 7), (7,)),
    "scalar shift": ((5, 7), (5, 7), ()),
    "only the shift is no scalar": ((), (), (5, 7)),
    "threads": ((257, 261), (257, 261), (257, 261)),
    "threads and columns": ((257, 261), (261,), (261,)),
}


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Triples of shapes, then of dtypes."""
    for name, shapes in SHAPES.items():
        pairs = zip("abc", shapes, strict=True)
        yield Sample(name, tuple(normal(key, shape, device, dtype) for key, shape in pairs))
    a, b = normal("a", (5, 9), device, dtype), normal("b", (5, 9), device, dtype)
    c = normal("c", (5, 9), device, dtype)
    row = normal("b", (9,), device, torch.float32)
    integers = torch.arange(-4, 5, device=device)
    flags = integers % 2 == 0
    wide = normal("c", (5, 9), device, torch.float64)
    cpu = torch.device("cpu")
    yield Sample("float32 in the middle", (a, row, c))
    yield Sample("float64 on the right", (a, b, wide))
    yield Sample("int64 and bool", (a, integers, flags))
    yield Sample("bool first", (flags, a, integers))
    yield Sample("0-dim float64 on the right", (a, b, normal("c", (), device, torch.float64)))
    yield Sample("0-dim on the CPU", (a, normal("b", (), cpu, dtype), normal("c", (), cpu, dtype)))


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Every refusal of muladd."""
    prefix = r"torchkiln\.muladd: "
    x = torch.ones(4, device=device)
    nothing = r"got NoneType, expected a torch\.Tensor( or a number)?"
    for i, name in enumerate("abc"):
        args = tuple(None if k == i else x for k in range(3))
        yield Invalid(f"{name} None", args, TypeError, f"{prefix}{name}: {nothing}")
    yield Invalid(
        "text", (x, "2", x), TypeError, prefix + r"b: got str, expected a torch\.Tensor or a number"
    )
    promoted = (
        "a, b, c: got dtypes {0}, {1} and {2}, which promote to {3}, "
        "expected one of float32, float64, float16, bfloat16"
    )
    for dtypes, both in (
        ((torch.int64, torch.int64, torch.int64), "int64"),
        ((torch.bool, torch.int32, torch.bool), "int32"),
        ((torch.float32, torch.complex64, torch.float32), "complex64"),
    ):
        names = [str(d).removeprefix("torch.") for d in dtypes]
        yield Invalid(
            " and ".join(names),
            tuple(x.to(d) for d in dtypes),
            RuntimeError,
            prefix + promoted.format(*names, both),
        )
    sparse = torch.eye(4, device=device).to_sparse()
    dense = torch.ones(4, 4, device=device)
    for i, name in enumerate("abc"):
        args = tuple(sparse if k == i else dense for k in range(3))
        yield Invalid(f"sparse {name}", args, RuntimeError, f"{prefix}{name}: {SPARSE}")
    three = torch.ones(3, device=device)
    fits = "expected one that broadcasts with {} of shape"
    yield Invalid(
        "shape of b",
        (x, three, x),
        RuntimeError,
        prefix + rf"b: got shape \[3\], {fits.format('a')} \[4\]",
    )
    yield Invalid(
        "shape of c",
        (x, dense, three),
        RuntimeError,
        prefix + rf"c: got shape \[3\], {fits.format('a and b')} \[4, 4\]",
    )
    yield Invalid(
        "meta beside real",
        (x, x, torch.ones(4, device="meta")),
        RuntimeError,
        prefix + f"c: got device meta, expected {x.device}, the device of a",
    )
    if device.type != "cpu":
        yield Invalid(
            "two devices",
            (x, torch.ones(4), x),
            RuntimeError,
            prefix + f"b: got device cpu, expected {x.device}, the device of a",
        )


def composite(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Two ops of torch."""
    return a * b + c


def magnitude(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """|a * b| + |c|."""
    return (a * b).abs() + c.abs()


def gradient_magnitude(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Where an argument is broadcast its gradient is a sum, whose terms may cancel."""
    return a * b.detach().abs() + a.detach().abs() * b + c


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """Three matrices of one shape."""
    a = torch.randn(shape, device=device, dtype=dtype)
    return Sample("bench", (a, torch.randn_like(a), torch.randn_like(a)))


def large(device: torch.device) -> Sample:
    """A matrix of more than 2**31 elements, a row and a number."""
    rows, columns = 2**16 + 1, 2**15 + 1
    a = torch.arange(rows, device=device).remainder(251).to(torch.bfloat16).unsqueeze(1)
    b = torch.arange(columns, device=device).remainder(241).to(torch.bfloat16)
    c = torch.tensor(3.0, device=device, dtype=torch.bfloat16)
    return Sample("large", (a.expand(rows, columns).contiguous(), b, c))


def traffic(sample: Sample) -> Traffic:
    """All are read, the output is written."""
    shape = torch.broadcast_shapes(*(t.shape for t in sample.args))
    size = sample.args[0].itemsize
    moved = sum(t.numel() * t.itemsize for t in sample.args) + shape.numel() * size
    return Traffic(moved, 2 * shape.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """Reads the incoming gradient, a and b, and writes two gradients; that of c is the incoming."""
    a, b, _ = sample.args
    count = torch.broadcast_shapes(*(t.shape for t in sample.args)).numel()
    moved = count * a.itemsize + 2 * (a.numel() * a.itemsize + b.numel() * b.itemsize)
    return Traffic(moved, 2 * count)


MULADD = OpSpec(
    name="muladd",
    op=torchkiln.muladd,
    overload=torch.ops.torchkiln.muladd.default,
    reference=composite,
    composite=composite,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    invalid=invalid,
    bench=bench,
    large=large,
    traffic=traffic,
    backward_traffic=backward_traffic,
    differentiable=(0, 1, 2),
    opaque=False,
    helpers=("muladd_backward",),
)
