"""The contract of group norm with an activation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln.testing.data import cycle, drawn_sizes, large_matrix, normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.activation import FORMULAS
from torchkiln.testing.specs.batch_norm import whole as batch_norm

# Shapes [batch, channels, ...] and groups: one group, one channel per group, no pixels, no samples,
# vectors of pixels with tails, groups of one and of several parts, many small groups.
SHAPES: Mapping[str, tuple[tuple[int, ...], int]] = {
    "rows": ((17, 12), 4),
    "one group": ((5, 6, 7), 1),
    "one channel for each group": ((3, 5, 9), 5),
    "one sample": ((1, 6, 5, 11), 2),
    "no samples": ((0, 6, 2, 2), 3),
    "volume": ((2, 6, 2, 3, 4), 3),
    "vectors": ((3, 16, 4, 8), 4),
    "planes": ((2, 6, 31, 67), 2),
    "long planes": ((2, 2, 61, 88), 1),
    "pixels": ((2, 9, 17, 17), 3),
    "many samples": ((1029, 6, 3), 2),
}
LAST: Mapping[str, tuple[tuple[int, ...], int]] = {
    "channels last": ((2, 24, 5, 3), 8),
    "channels last, odd": ((3, 15, 7, 3), 5),
    "channels last, rows": ((2, 40, 41, 67), 4),
    "channels last, wide groups": ((2, 1032, 2, 3), 3),
}
PIXELS = 64
"""Height and width of the images that are timed."""
BENCH_SHAPES = ((262144, 320), (131072, 512), (65536, 1280))
"""Pixels of all images, and channels."""
SMALL_SHAPES = tuple((pixels, 320) for pixels in (4096, 16384))
GROUPS = 32


class Arguments(batch_norm.Arguments):
    """The arguments of a call by name, with statistics per group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = ("x", "num_groups", "weight", "bias", "eps")
        given = dict(zip(names, args, strict=False)) | kwargs
        self.groups: int = given.pop("num_groups")
        super().__init__(**({"act": "none"} | given), training=True)

    def mean_of(self, x: Tensor) -> Tensor:
        """The mean of each group, with the shape of x."""
        rows = x.reshape(x.shape[0] * self.groups, -1 if x.numel() else 0)
        return rows.mean(1, keepdim=True).expand_as(rows).reshape(x.shape)


def reference(*args: Any, **kwargs: Any) -> Tensor:
    """The formula of the op in plain torch."""
    return Arguments(*args, **kwargs).reference()


def composite(*args: Any, **kwargs: Any) -> Tensor:
    """Torch's group norm and activation."""
    given = Arguments(*args, **kwargs)
    x = given.x
    # Torch's kernels need a weight for the gradient of a bias, and the dtype of x.
    weight = x.new_ones(x.shape[1]) if given.weight is None else given.weight.to(x.dtype)
    bias = None if given.bias is None else given.bias.to(x.dtype)
    y = F.group_norm(x, given.groups, weight, bias, given.eps)
    return FORMULAS[given.act].value(y).to(x.dtype)


def magnitude(*args: Any, **kwargs: Any) -> Tensor:
    """The magnitude of each element's terms, to which its rounding error is proportional."""
    return Arguments(*args, **kwargs).magnitude()


def gradient_magnitude(*args: Any, **kwargs: Any) -> Tensor:
    """A function whose gradients are the op's, with the absolute values of all terms."""
    return Arguments(*args, **kwargs).gradient_magnitude()


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each activation, each shape, both layouts, and missing tensors."""

    def sample(
        name: str,
        shape: tuple[int, ...],
        groups: int,
        owned: torch.dtype | None = None,
        **options: Any,
    ) -> Sample:
        x = normal("x", shape, device, dtype)
        weight, bias = (
            normal(each, shape[1:2], device, owned or dtype) for each in ("weight", "bias")
        )
        return Sample(name, (x, groups, weight, bias), options)

    yield sample("typical", (3, 4, 2, 2), 2, act="silu")
    for act in FORMULAS:
        yield sample(act, (3, 6, 9), 2, act=act)
    for name, (shape, groups) in SHAPES.items():
        yield sample(name, shape, groups, eps=1e-3)
    for name, (shape, groups) in LAST.items():
        last = sample(name, shape, groups, act="silu")
        yield last.map(
            lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
        )
    plain = sample("no parameters", (5, 6, 4), 3)
    yield plain.substitute(2, None).substitute(3, None)
    yield sample("weight alone", (5, 6, 5), 3).substitute(3, None)
    yield sample("bias alone", (5, 6, 5), 3, act="silu").substitute(2, None)
    if dtype in (torch.float16, torch.bfloat16):
        yield sample("float32 parameters", (9, 21, 3), 7, owned=torch.float32)


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call on images with silu, as in the networks of diffusion models."""
    pixels, channels = shape
    count = max(pixels // PIXELS**2, 1)
    x = torch.randn(count, channels, PIXELS, PIXELS, device=device, dtype=dtype)
    parameters = [torch.randn(channels, device=device, dtype=dtype) for _ in range(2)]
    return Sample("bench", (x, math.gcd(channels, GROUPS), *parameters), {"act": "silu"})


def bench_variants(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    """The benchmark call in ``channels_last``, and without an activation."""
    plain = bench(device, dtype, shape)
    x = plain.args[0].contiguous(memory_format=torch.channels_last)
    yield "channels_last", plain.substitute(0, x)
    yield "no activation", Sample("bench", plain.args, {})


def drawn(device: torch.device, dtype: torch.dtype, rng: Random, most: int) -> Sample:
    """A call with random samples, channels and groups: no pixels, sequences, or images."""
    rank = rng.choice((2, 2, 3, 4, 4))
    batch, channels, *pixels = drawn_sizes(rng, most, rank)
    groups = rng.choice([n for n in (1, 2, 4, 8, 16, 32, 64, channels) if channels % n == 0])
    x = torch.randn(batch, channels, *pixels, device=device, dtype=dtype)
    parameters = [torch.randn(channels, device=device, dtype=dtype) for _ in range(2)]
    return Sample("drawn", (x, groups, *parameters), {"act": rng.choice(("none", "silu"))})


def large(device: torch.device) -> Sample:
    """A call on a matrix of more than 2**31 elements, whose samples have one pixel."""
    x = large_matrix(device)
    columns = x.shape[1]
    weight, bias = (cycle(columns, length, device) for length in (113, 127))
    return Sample("large", (x, math.gcd(columns, GROUPS), weight, bias))


def traffic(sample: Sample) -> Traffic:
    """Reads x twice, writes y."""
    x = sample.args[0]
    return Traffic(3 * x.nbytes, 8 * x.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """Traffic that reads the incoming gradient and x twice, and writes the gradient of x."""
    x = sample.args[0]
    return Traffic(5 * x.nbytes, 12 * x.numel())


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with no channels, groups that do not divide the channels, numbers out of range."""
    x, row = torch.ones(4, 6, device=device), torch.ones(6, device=device)
    good = GoodCall(torch.ops.torchkiln.group_norm.default, Sample("good", (x, 3, row, row)))
    words = "expected [batch, channels, ...]"
    yield good.changed(f"x: got shape [6], {words}", x=row)
    yield good.changed(f"x: got shape [], {words}", x=row[0])
    for groups in (4, 0, -3, 12):
        words = f"num_groups: got {groups}, expected a divisor of 6, the channels of x"
        yield good.changed(words, ValueError, num_groups=groups)
    for eps, said in ((-1e-5, "-1e-05"), (math.nan, "nan")):
        yield good.changed(f"eps: got {said}, expected a number of at least 0", ValueError, eps=eps)
    half = good.cast(torch.bfloat16)
    words = "bias: got dtype float32, expected bfloat16, the dtype of weight"
    yield half.changed(words, bias=row)


GROUP_NORM = OpSpec(
    op=torchkiln.group_norm,
    reference=reference,
    composite=composite,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    differentiable=(0, 2, 3),
    refusals=Refusals(
        parameters=dict.fromkeys(("weight", "bias"), "x"),
        shapes=dict.fromkeys(("weight", "bias"), "the channels of x"),
        words={"act": tuple(FORMULAS)},
    ),
    invalid=invalid,
    bench=bench,
    bench_variants=bench_variants,
    drawn=drawn,
    bench_shapes=BENCH_SHAPES,
    small_shapes=SMALL_SHAPES,
    large=large,
    traffic=traffic,
    backward_traffic=backward_traffic,
    opaque=True,
    helpers=("_group_norm_forward", "_group_norm_backward"),
    module=layer(torchkiln.nn.GroupNorm, 2, 4, act="silu"),
)
