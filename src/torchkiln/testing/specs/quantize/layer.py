"""The contract of the linear layer in float8_e4m3fn.

The reference is the exact quantised one: it rounds the same factors to E4M3 by torch's conversion,
in forward and in backward, and multiplies them in float64. tests/ops/test_quantize.py compares the
ops that return E4M3 with it bit by bit.

The op is timed beside torch's layer in the dtype of x at sizes that :func:`torchkiln.replace` gives
to FP8, and beside torch's casts and product in E4M3 at sizes that it leaves alone. It gives no
layer on a CPU to FP8; torch's product there is that of the values in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import torchkiln
from torchkiln.testing import scaled_product
from torchkiln.testing.compare import steps
from torchkiln.testing.data import drawn_size, drawn_sizes, normal
from torchkiln.testing.derive import layer
from torchkiln.testing.forms import TRANSFORMS
from torchkiln.testing.refusals import SPARSE, GoodCall
from torchkiln.testing.sample import Invalid, Sample
from torchkiln.testing.spec import OpSpec

BLOCK = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Shapes of x and numbers of output features: one block, several, sizes that are padded, none.
SHAPES: Mapping[str, tuple[tuple[int, ...], int]] = (
    {"typical": ((6, 10), 8), "one": ((1, 1), 1), "row": ((37,), 5), "batch": ((2, 3, 16), 32)}
    | {"block": ((32, 128), 128), "block and one": ((33, 129), 130), "no rows": ((0, 5), 3)}
    | {"no terms": ((4, 0), 3), "blocks": ((130, 260), 140), "no columns": ((4, 5), 0)}
)


def rounded(x: Tensor, rows: int) -> Tensor:
    """The numbers that x becomes, in blocks of ``rows`` x 128 elements of a matrix."""
    if x.numel() == 0:
        return x
    finite = torch.where(x.isfinite(), x.abs(), 0).double()
    most = torch.stack(
        [
            torch.stack([tile.amax((0, 1)) for tile in strip.split(BLOCK, 1)])
            for strip in finite.split(rows, 0)
        ]
        if rows > 1
        else [part.amax(1) for part in finite.split(BLOCK, 1)]
    )
    most = most if rows > 1 else most.T
    mantissa, exponent = torch.frexp(most)
    power = (exponent - 9 + (mantissa > 0.875).int()).clamp(min=-126)  # 448 = 0.875 * 2**9
    scale = torch.where(most == 0, 1.0, torch.ldexp(torch.ones_like(mantissa), power))
    each = scale.repeat_interleave(rows, 0)[: x.shape[0]]
    each = each.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    found = (x.double() / each).float().to(torch.float8_e4m3fn).double() * each
    return torch.where(x.isfinite(), found, torch.nan).to(x.dtype)


class Exact(torch.autograd.Function):
    """The product of quantised factors, and its gradients by quantised products.

    ``part`` maps the numbers of each factor: the identity, or absolute values for magnitudes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """The product of the rows of x with the weight."""
        ctx.save_for_backward(x, weight)
        ctx.part = part
        return part(rounded(x, 1)) @ part(rounded(weight, BLOCK)).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Products of the gradient with the weight, and with the columns of x."""
        x, weight = ctx.saved_tensors
        part = ctx.part
        columns = part(rounded(x.T.contiguous(), BLOCK))
        passed = part(rounded(grad.T.contiguous(), 1))
        return part(rounded(grad, 1)) @ part(rounded(weight, BLOCK)), passed @ columns.T, None


def product(
    part: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The layer, for x of any rank."""
    rows = x.shape[:-1].numel()
    exact: Any = Exact
    found: Tensor = exact.apply(x.reshape(rows, x.shape[-1]), weight, part)
    y = found.reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + part(bias)


reference = partial(product, Tensor.clone)


def composite(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product in float32, rounded once."""
    shift = None if bias is None else bias.float()
    return reference(x.float(), weight.float(), shift).to(x.dtype)


TENSOR_CORES = 2.0**11
"""The error of a tensor core's sum of E4M3 products, in the unit of `steps`.

GPUs of compute capability 8.9 and 9.0 shift the products of a step to the largest one and keep 13
bits behind its first, where float32 keeps 23. A product loses half a bit on average, all of them in
one direction at worst. The largest of 32 normal products is 6 times their mean: a sum loses 3, and
with the next power of two at most 4, times 2**-13 of its absolute values.
"""


def magnitude(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sums of the absolute values, times the growth of errors."""
    growth = steps(x.shape[-1])
    terms = product(Tensor.abs, x, weight, bias)
    return terms * (max(growth, TENSOR_CORES) if x.is_cuda else growth)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape and a bias, and with some shapes without one."""
    for turn, (name, (shape, features)) in enumerate(SHAPES.items()):
        x = normal("x", shape, device, dtype)
        weight = normal("weight", (features, shape[-1]), device, dtype)
        bias = normal("bias", (features,), device, dtype)
        yield Sample(name, (x, weight, bias))
        if turn % 3 == 0:
            yield Sample(f"{name}, no bias", (x, weight))


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call of a layer as wide as its input."""
    x = torch.randn(shape, device=device, dtype=dtype)
    weight = torch.randn(shape[1], shape[1], device=device, dtype=dtype) / shape[1] ** 0.5
    return Sample("bench", (x, weight))


def bench_variants(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    """A call of the first feed-forward layer of Llama, 3.5 times as wide as its input."""
    x = bench(device, dtype, shape).args[0]
    weight = torch.randn(shape[1] * 7 // 2, shape[1], device=device, dtype=dtype)
    yield "3.5 x as wide", Sample("wide", (x, weight / shape[1] ** 0.5))


MOST_INSIDE = 1 << 13
"""The most columns of a drawn weight."""
MOST_TOKENS = 1 << 14
"""The most rows of a drawn call of a layer of usual size."""


def drawn(device: torch.device, dtype: torch.dtype, rng: Random, most: int) -> Sample:
    """A layer as wide as its input or 3.5 times as wide; half of the layers have usual sizes.

    The weight was quantised before, as :class:`torchkiln.nn.LinearFP8` does once per version.
    """
    if rng.random() < 0.5:
        rows, inside = drawn_sizes(rng, most, 2)
    else:
        rows, inside = drawn_size(rng, MOST_TOKENS), BLOCK * rng.randint(8, MOST_INSIDE // BLOCK)
    inside = min(inside, MOST_INSIDE, math.isqrt(most))
    outside = min(inside * rng.choice((2, 7)) // 2, most // inside)
    rows = min(rows, most // max(inside, outside))
    x = torch.randn(rows, inside, device=device, dtype=dtype)
    weight = torch.randn(outside, inside, device=device, dtype=dtype) / inside**0.5
    return Sample("drawn", (x, weight), {"quantized": torchkiln.quantize_weight(weight)})


def usual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    quantized: torchkiln.QuantizedWeight | None = None,
) -> Tensor:
    """Torch's layer in the dtype of x where FP8 should gain, else its layer in E4M3."""
    # At the top of the file, it would be a circular import.
    from torchkiln.patch.fp8 import STEP, gains  # noqa: PLC0415

    is_whole = not any(size % STEP for size in weight.shape)
    if x.is_cuda and is_whole and gains(x.shape[:-1].numel(), weight):
        return F.linear(x, weight, bias)
    return scaled_product.linear(x, weight, bias, quantized)


def operations(sample: Sample) -> tuple[int, int]:
    """A multiplication and an addition for each term; backward has two products."""
    x, weight = sample.args[:2]
    terms = x.numel() * weight.shape[0]
    return 2 * terms, 4 * terms


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with shapes that do not match, and with other dtypes, layouts and devices."""
    x, weight = torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)
    good = GoodCall(torch.ops.torchkiln.linear_fp8.default, Sample("good", (x, weight)))
    words = "weight: got size 3 in dimension 1 of shape [4, 3], expected 4, the last size of x"
    yield good.changed(words, weight=weight.T)
    yield good.changed("weight: got shape [4], expected [n, k]", weight=weight[0])
    words = "x: got a 0-dimensional tensor, expected at least 1 dimension"
    yield good.changed(words, x=x[0, 0])
    words = "bias: got shape [2], expected [3], the rows of weight"
    yield good.changed(words, bias=x[:, 0])
    for name, tensor in (("x", x), ("weight", weight)):
        yield good.changed(f"{name}: {SPARSE}", **{name: tensor.to_sparse()})
        words = f"{name}: got dtype float64, expected one of float32, float16, bfloat16"
        yield good.changed(words, **{name: tensor.double()})
    words = f"weight: got device meta, expected {x.device}, the device of x"
    yield good.changed(words, weight=weight.to("meta"))


NO_TRANSFORMS = dict.fromkeys(
    TRANSFORMS, "rounding to float8_e4m3fn has no derivative; the op refuses by name"
)

LINEAR_FP8 = OpSpec(
    op=torchkiln.linear_fp8,
    reference=reference,
    composite=composite,
    usual=usual,
    magnitude=magnitude,
    gradient_magnitude=magnitude,
    inputs=inputs,
    differentiable=(0, 1, 2),
    dtypes=DTYPES,
    invalid=invalid,
    bench=bench,
    bench_variants=bench_variants,
    drawn=drawn,
    large=None,
    operations=operations,
    autocast=(0,),
    opaque=True,
    threads_matter=True,
    composed=True,
    helpers=("quantize_both", "quantize_weight", "_quantized_product"),
    excluded=NO_TRANSFORMS
    | {
        "gradients_that_are_recorded": "no second derivative; the op refuses by name",
        "opcheck_helpers": "torch's check multiplies arguments, and has no product of E4M3",
    },
    module=layer(torchkiln.nn.LinearFP8, 10, 8),
)
