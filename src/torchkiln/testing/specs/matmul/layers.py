"""The contracts of products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import torchkiln
from torchkiln.ops.matmul import matmul
from torchkiln.testing.compare import steps
from torchkiln.testing.data import LARGE, normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.activation import FORMULAS, amplified

FLAT = "got a 0-dimensional tensor, expected at least 1 dimension"

# Shapes of a and b: matrices, one row, one column, no elements, no terms, odd and even sizes around
# the tiles of the kernels, vectors, batches with each kind of broadcasting.
SHAPES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = (
    {"typical": ((6, 10), (10, 8)), "one": ((1, 1), (1, 1)), "one row": ((1, 37), (37, 5))}
    | {"one column": ((5, 37), (37, 1)), "one term": ((7, 1), (1, 9)), "no rows": ((0, 5), (5, 3))}
    | {"no columns": ((4, 5), (5, 0)), "no terms": ((4, 0), (0, 3)), "prime": ((7, 13), (13, 11))}
    | {"tile less one": ((31, 63), (63, 127)), "tile": ((32, 64), (64, 128))}
    | {"tile and one": ((33, 65), (65, 129)), "vectors": ((13,), (13,))}
    | {"vector and matrix": ((13,), (13, 4)), "matrix and vector": ((4, 13), (13,))}
    | {"vector and matrices": ((5,), (3, 5, 4)), "matrices and vector": ((3, 4, 5), (5,))}
    | {"batch": ((3, 4, 5), (3, 5, 2)), "batch of nothing": ((0, 4, 5), (0, 5, 2))}
    | {"one matrix for all": ((3, 4, 5), (5, 2)), "all for one matrix": ((4, 5), (3, 5, 2))}
    | {"crossed batches": ((2, 1, 4, 5), (3, 5, 2)), "large": ((130, 258), (258, 70))}
)


def matmul_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """A call for each pair of shapes."""
    for name, (left, right) in SHAPES.items():
        yield Sample(name, (normal("a", left, device, dtype), normal("b", right, device, dtype)))


def absolute_product(a: Tensor, b: Tensor) -> Tensor:
    """The sums of |a| |b|, times the growth of rounding errors."""
    return torch.matmul(a.abs(), b.abs()) * steps(a.shape[-1])


def matmul_bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call with a matrix and a square matrix."""
    sizes = (shape, (shape[1], shape[1]))
    return Sample("bench", tuple(torch.randn(s, device=device, dtype=dtype) for s in sizes))


def products(a: Tensor, b: Tensor) -> tuple[int, int]:
    """A multiplication and an addition for each term; backward has two products."""
    terms = torch.matmul(a.to("meta"), b.to("meta")).numel() * a.shape[-1]
    return 2 * terms, 4 * terms


def matmul_invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with shapes whose product is not defined."""
    a, b = torch.ones(2, 4, device=device), torch.ones(4, 3, device=device)
    good = GoodCall(torch.ops.torchkiln.matmul.default, Sample("good", (a, b)))
    yield good.changed(f"a: {FLAT}; multiply with *", a=a[0, 0])
    yield good.changed(f"b: {FLAT}; multiply with *", b=b[0, 0])
    words = "b: got shape [2, 4], expected 4 in dimension -2, the last size of a"
    yield good.changed(words, b=a)
    words = "b: got shape [3], expected 4 in dimension -1, the last size of a"
    yield good.changed(words, b=b[0])
    expected = "expected leading sizes that broadcast with a of shape [2, 2, 4]"
    words = f"b: got shape [3, 4, 3], {expected}"
    yield good.changed(words, a=a.expand(2, 2, 4), b=b.expand(3, 4, 3))


def wide(device: torch.device) -> tuple[Tensor, Tensor]:
    """Factors of a product with more than 2**31 elements; each is a sum of 8 integer products."""
    rows, columns = LARGE
    terms = 8
    left = torch.arange(rows * terms, device=device).remainder(13).sub(6)
    right = torch.arange(columns * terms, device=device).remainder(11).sub(5)
    return left.reshape(rows, terms).bfloat16(), right.reshape(columns, terms).bfloat16()


def matmul_large(device: torch.device) -> Sample:
    """A call whose product has more than 2**31 elements."""
    a, b = wide(device)
    return Sample("large", (a, b.T))


def linear_sample(
    name: str,
    x: Tensor,
    features: int,
    act: str,
    *,
    scale: float = 1.0,
    bias_dtype: torch.dtype | None = None,
    has_bias: bool = True,
    has_residual: bool = False,
) -> Sample:
    """A call of a layer with ``features`` outputs."""
    terms = x.shape[-1]
    weight = normal("weight", (features, terms), x.device, torch.float64) / max(terms, 1) ** 0.5
    bias = normal("bias", (features,), x.device, bias_dtype or x.dtype) if has_bias else None
    residual = None
    if has_residual:
        residual = normal("residual", (*x.shape[:-1], features), x.device, x.dtype)
    return Sample(f"{name}, {act}", (x, weight.to(x.dtype), bias, act, scale, residual))


def linear_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each activation, with and without a residual; each shape; scales, mixed dtypes."""
    x = normal("x", (6, 10), device, dtype)
    acts = ["gelu", *(act for act in FORMULAS if act != "gelu")]
    for act in acts:
        yield linear_sample("typical", x, 8, act)
        yield linear_sample("residual", x, 8, act, has_residual=True)
        yield linear_sample("no bias", x, 7, act, has_bias=False)
    shapes = {name: pair for name, pair in SHAPES.items() if len(pair[1]) == 2}
    for i, (name, (left, right)) in enumerate(shapes.items()):
        rows = normal("x", left, device, dtype)
        yield linear_sample(f"shape {name}", rows, right[1], "none")
        act = acts[i % len(acts)]
        yield linear_sample(f"shape {name} again", rows, right[1], act, has_residual=i % 2 == 0)
    for act in ("none", "relu"):
        yield linear_sample("scale", x, 8, act, scale=-0.6)
        yield linear_sample("scale, no bias", x, 8, act, scale=1.7, has_bias=False)
    yield Sample("weight alone", linear_sample("", x, 8, "none").args[:2])
    if dtype in (torch.float16, torch.bfloat16):
        yield linear_sample("float32 bias", x, 8, "none", bias_dtype=torch.float32)


def preactivation(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The argument of the activation, rounded as in torch: once if bias and x have one dtype."""
    if bias is None:
        return F.linear(x, weight) * scale
    if bias.dtype != x.dtype:
        return (F.linear(x, weight) * scale + bias).to(x.dtype)
    if scale == 1:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    flat = torch.addmm(bias, rows, weight.T, alpha=scale)
    return flat.reshape(*x.shape[:-1], -1)


class Call(NamedTuple):
    """The arguments of linear by name."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    act: str = "none"
    scale: float = 1.0
    residual: Tensor | None = None

    @property
    def preactivation(self) -> Tensor:
        """The argument of the activation."""
        z = F.linear(self.x, self.weight) * self.scale
        return z if self.bias is None else z + self.bias

    @property
    def terms(self) -> Tensor:
        """The absolute values of the argument's terms, summed, times the growth of errors."""
        factor = abs(self.scale) * steps(self.x.shape[-1])
        terms = F.linear(self.x.abs(), self.weight.abs()) * factor
        return terms if self.bias is None else terms + self.bias.abs()


def linear_composite(*args: Any) -> Tensor:
    """The ops that a user would write."""
    x, weight, bias, act, scale, residual = Call(*args)
    y = FORMULAS[act].value(preactivation(x, weight, bias, scale))
    return y if residual is None else y + residual


def linear_reference(*args: Any) -> Tensor:
    """The formula of the op in plain torch."""
    call = Call(*args)
    y = FORMULAS[call.act].exact(call.preactivation)
    return y if call.residual is None else y + call.residual


def linear_magnitude(*args: Any) -> Tensor:
    """The magnitude of the sums, amplified by the activation, plus |residual|."""
    call = Call(*args)
    terms = amplified(call.act, call.terms)
    return terms if call.residual is None else terms + call.residual.abs()


def linear_intermediate_sensitivity(*args: Any) -> Tensor:
    """The effect of rounding the argument of the activation."""
    call = Call(*args)
    z = call.preactivation
    return FORMULAS[call.act].slope_terms(z) * z.abs()


def linear_gradient_magnitude(*args: Any) -> Tensor:
    """A function whose gradients sum absolute values, with the effect of a rounded argument."""
    call = Call(*args)
    formula = FORMULAS[call.act]
    terms = call.terms
    with torch.no_grad():
        slope = formula.slope_terms(call.preactivation) + formula.curvature * terms
    y = terms * slope
    return y if call.residual is None else y + call.residual.abs()


def linear_bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call of a layer as wide as its input, with gelu."""
    x, weight = matmul_bench(device, dtype, shape).args
    bias = torch.randn(shape[1:], device=device, dtype=dtype)
    return Sample("bench", (x, weight / shape[1] ** 0.5, bias, "gelu"))


def linear_bench_variants(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    """A layer with one output more than a multiple of 8, without a bias, as a head of classes."""
    x, weight = matmul_bench(device, dtype, shape).args
    odd = torch.cat([weight, weight[:1]]) / shape[1] ** 0.5
    yield "padded", Sample("bench", (x, odd))


def linear_large(device: torch.device) -> Sample:
    """A call of a layer with more than 2**31 outputs."""
    x, weight = wide(device)
    return Sample("large", (x, weight, None, "relu"))


def linear_backward_traffic(sample: Sample) -> Traffic:
    """Traffic that reads gradient, x, weight and the derivative's input, and writes gradients."""
    x, weight = sample.args[:2]
    out = x.shape[:-1].numel() * weight.shape[0] * x.itemsize
    return Traffic(2 * (x.nbytes + weight.nbytes + out), products(x, weight.T)[1])


def linear_invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with shapes that do not match."""
    x, weight = torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)
    good = GoodCall(torch.ops.torchkiln.linear.default, Sample("good", (x, weight)))
    yield good.changed(f"x: {FLAT}", x=x[0, 0])
    words = "weight: got 1 dimensions (shape [4]), expected 2"
    yield good.changed(words, weight=weight[0])
    words = "weight: got shape [4, 3], expected 4 as the second size, the last size of x"
    yield good.changed(words, weight=weight.T)


BENCH_SHAPES = ((4096, 4096), (8192, 8192))

MATMUL = OpSpec(
    op=matmul,
    reference=torch.matmul,
    magnitude=absolute_product,
    gradient_magnitude=absolute_product,
    inputs=matmul_inputs,
    refusals=Refusals(dtypes={"b": "a"}),
    invalid=matmul_invalid,
    bench=matmul_bench,
    large=matmul_large,
    operations=lambda sample: products(*sample.args),
    autocast=(0, 1),
    bench_shapes=BENCH_SHAPES,
    opaque=False,
    threads_matter=True,
)

LINEAR = OpSpec(
    op=torchkiln.linear,
    reference=linear_reference,
    composite=linear_composite,
    magnitude=linear_magnitude,
    gradient_magnitude=linear_gradient_magnitude,
    # Not because of a rounded output: backward rounds the gradient of the activation's argument
    # before it multiplies it by weight and x.
    output_sensitivity=linear_gradient_magnitude,
    intermediate_sensitivity=linear_intermediate_sensitivity,
    inputs=linear_inputs,
    differentiable=(0, 1, 2, 5),
    refusals=Refusals(
        dtypes={"weight": "x", "residual": "x"},
        parameters={"bias": "x"},
        shapes={"bias": "the first size of weight", "residual": "the shape of the output"},
        words={"act": tuple(FORMULAS)},
    ),
    invalid=linear_invalid,
    bench=linear_bench,
    bench_variants=linear_bench_variants,
    large=linear_large,
    operations=lambda sample: products(sample.args[0], sample.args[1].T),
    backward_traffic=linear_backward_traffic,
    autocast=(0, 1, 5),
    bench_shapes=BENCH_SHAPES,
    opaque=True,
    threads_matter=True,
    helpers=("_linear_forward",),
    module=layer(torchkiln.nn.Linear, 10, 8, act="gelu"),
)
