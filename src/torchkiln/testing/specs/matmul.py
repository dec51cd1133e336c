"""The contracts of products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln
from torchkiln.testing.compare import steps
from torchkiln.testing.data import normal
from torchkiln.testing.spec import OpSpec, Sample, Traffic
from torchkiln.testing.specs.activation import FORMULAS
from torchkiln.testing.specs.matmul_invalid import linear_invalid, matmul_invalid

if TYPE_CHECKING:
    from collections.abc import Iterator

# Shapes of both: matrices, one row, one column, no elements, no terms, odd and even sizes around
# the tiles of the kernels, vectors, batches of each kind of broadcasting.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "typical": ((6, 10), (10, 8)),
    "one": ((1, 1), (1, 1)),
    "one row": ((1, 37), (37, 5)),
    "one column": ((5, 37), (37, 1)),
    "one term": ((7, 1), (1, 9)),
    "no rows": ((0, 5), (5, 3)),
    "no columns": ((4, 5), (5, 0)),
    "no terms": ((4, 0), (0, 3)),
    "prime": ((7, 13), (13, 11)),
    "tile less one": ((31, 63), (63, 127)),
    "tile": ((32, 64), (64, 128)),
    "tile and one": ((33, 65), (65, 129)),
    "vectors": ((13,), (13,)),
    "vector and matrix": ((13,), (13, 4)),
    "matrix and vector": ((4, 13), (13,)),
    "vector and matrices": ((5,), (3, 5, 4)),
    "matrices and vector": ((3, 4, 5), (5,)),
    "batch": ((3, 4, 5), (3, 5, 2)),
    "batch of nothing": ((0, 4, 5), (0, 5, 2)),
    "one matrix for all": ((3, 4, 5), (5, 2)),
    "all for one matrix": ((4, 5), (3, 5, 2)),
    "crossed batches": ((2, 1, 4, 5), (3, 5, 2)),
    "large": ((130, 258), (258, 70)),
}


def matmul_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every shape."""
    for name, (left, right) in SHAPES.items():
        yield Sample(name, (normal("a", left, device, dtype), normal("b", right, device, dtype)))


def absolute_product(a: Tensor, b: Tensor) -> Tensor:
    """The sums of |a| |b|, and how often they are rounded."""
    return torch.matmul(a.abs(), b.abs()) * steps(a.shape[-1])


def matmul_bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A matrix times a square one."""
    rows, columns = shape
    a = torch.randn(rows, columns, device=device, dtype=dtype)
    return Sample("bench", (a, torch.randn(columns, columns, device=device, dtype=dtype)))


def product_sizes(a: Tensor, b: Tensor) -> tuple[int, int]:
    """Elements of the output, and terms of each."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return batch.numel() * a.shape[-2] * b.shape[-1], a.shape[-1]


def matmul_traffic(sample: Sample) -> Traffic:
    """Reads both, writes the output; a multiplication and an addition for each term."""
    a, b = sample.args
    elements, terms = product_sizes(a, b)
    return Traffic((a.numel() + b.numel() + elements) * a.itemsize, 2 * elements * terms)


def matmul_backward_traffic(sample: Sample) -> Traffic:
    """Two products: reads the incoming gradient and both, writes a gradient for each."""
    a, b = sample.args
    elements, terms = product_sizes(a, b)
    return Traffic((2 * (a.numel() + b.numel()) + elements) * a.itemsize, 4 * elements * terms)


def wide(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Few terms of small whole numbers, for many results."""
    terms = 8
    left = torch.arange(rows * terms, device=device).remainder(13).sub(6)
    right = torch.arange(columns * terms, device=device).remainder(11).sub(5)
    return left.reshape(rows, terms).bfloat16(), right.reshape(columns, terms).bfloat16()


def matmul_large(device: torch.device) -> Sample:
    """A product of more than 2**31 elements."""
    a, b = wide(2**16 + 1, 2**15 + 1, device)
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
    """A call of ``features`` outputs."""
    terms = x.shape[-1]
    weight = normal("weight", (features, terms), x.device, torch.float64) / max(terms, 1) ** 0.5
    bias = normal("bias", (features,), x.device, bias_dtype or x.dtype) if has_bias else None
    residual = None
    if has_residual:
        residual = normal("residual", (*x.shape[:-1], features), x.device, x.dtype)
    return Sample(f"{name}, {act}", (x, weight.to(x.dtype), bias, act, scale, residual))


def linear_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every activation, alone and beside a residual; every shape; scales, mixed dtypes."""
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
    """As torch rounds it: once, where bias and product have one dtype."""
    if bias is None:
        return F.linear(x, weight) * scale
    if bias.dtype != x.dtype:
        return (F.linear(x, weight) * scale + bias).to(x.dtype)
    if scale == 1:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    flat = torch.addmm(bias, rows, weight.T, alpha=scale)
    return flat.reshape(*x.shape[:-1], -1)


def linear_composite(  # noqa: PLR0917
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: str = "none",
    scale: float = 1.0,
    residual: Tensor | None = None,
) -> Tensor:
    """The ops that a user would write."""
    y = FORMULAS[act].value(preactivation(x, weight, bias, scale))
    return y if residual is None else y + residual


def linear_reference(  # noqa: PLR0917
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: str = "none",
    scale: float = 1.0,
    residual: Tensor | None = None,
) -> Tensor:
    """The formula."""
    z = F.linear(x, weight) * scale
    y = FORMULAS[act].exact(z if bias is None else z + bias)
    return y if residual is None else y + residual


def absolute_terms(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The terms of what the activation gets."""
    terms = F.linear(x.abs(), weight.abs()) * (abs(scale) * steps(x.shape[-1]))
    return terms if bias is None else terms + bias.abs()


def linear_magnitude(  # noqa: PLR0917
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: str = "none",
    scale: float = 1.0,
    residual: Tensor | None = None,
) -> Tensor:
    """The terms of the sums, which no activation but the square amplifies."""
    terms = absolute_terms(x, weight, bias, scale)
    terms = terms * terms if act == "square" else terms
    return terms if residual is None else terms + residual.abs()


def linear_gradient_magnitude(  # noqa: PLR0917
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: str = "none",
    scale: float = 1.0,
    residual: Tensor | None = None,
) -> Tensor:
    """The terms of the sums, the activation's own, and what rounding does to its derivative."""
    formula = FORMULAS[act]
    terms = absolute_terms(x, weight, bias, scale)
    with torch.no_grad():
        z = F.linear(x, weight) * scale
        z = z if bias is None else z + bias
        slope = formula.slope_terms(z) + formula.curvature * terms
    y = terms * slope
    return y if residual is None else y + residual.abs()


def linear_bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A layer as wide as its input, with gelu."""
    rows, columns = shape
    x = torch.randn(rows, columns, device=device, dtype=dtype)
    weight = torch.randn(columns, columns, device=device, dtype=dtype) / columns**0.5
    return Sample("bench", (x, weight, torch.randn(columns, device=device, dtype=dtype), "gelu"))


def linear_large(device: torch.device) -> Sample:
    """A layer with more than 2**31 outputs."""
    x, weight = wide(2**16 + 1, 2**15 + 1, device)
    return Sample("large", (x, weight, None, "relu"))


def linear_traffic(sample: Sample) -> Traffic:
    """Reads the arguments, writes the output."""
    x, weight = sample.args[:2]
    elements, terms = product_sizes(x, weight.T)
    moved = sum(sample.args[i].numel() for i in sample.positions) + elements
    return Traffic(moved * x.itemsize, 2 * elements * terms)


def linear_backward_traffic(sample: Sample) -> Traffic:
    """Reads the gradient, x, weight and what the derivative needs; writes a gradient for each."""
    x, weight = sample.args[:2]
    elements, terms = product_sizes(x, weight.T)
    moved = 2 * (x.numel() + weight.numel()) + 2 * elements
    return Traffic(moved * x.itemsize, 4 * elements * terms)


def module(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A layer with all that it can have."""
    layer = torchkiln.nn.Linear(10, 8, act="gelu", device=device, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(normal("weight", (8, 10), device, dtype))
        layer.bias.copy_(normal("bias", (8,), device, dtype))
    return layer


def module_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows for :func:`module`."""
    return (normal("x", (6, 10), device, dtype),)


BENCH_SHAPES = ((4096, 4096), (8192, 8192))

MATMUL = OpSpec(
    name="matmul",
    op=torchkiln.matmul,
    overload=torch.ops.torchkiln.matmul.default,
    reference=torch.matmul,
    composite=torch.matmul,
    magnitude=absolute_product,
    gradient_magnitude=absolute_product,
    inputs=matmul_inputs,
    invalid=matmul_invalid,
    bench=matmul_bench,
    large=matmul_large,
    traffic=matmul_traffic,
    backward_traffic=matmul_backward_traffic,
    differentiable=(0, 1),
    autocast=(0, 1),
    bench_shapes=BENCH_SHAPES,
    opaque=False,
    threads_matter=True,
)

LINEAR = OpSpec(
    name="linear",
    op=torchkiln.linear,
    overload=torch.ops.torchkiln.linear.default,
    reference=linear_reference,
    composite=linear_composite,
    magnitude=linear_magnitude,
    gradient_magnitude=linear_gradient_magnitude,
    # The gradient of what the activation got is rounded before it is multiplied.
    output_sensitivity=linear_gradient_magnitude,
    inputs=linear_inputs,
    invalid=linear_invalid,
    bench=linear_bench,
    large=linear_large,
    traffic=linear_traffic,
    backward_traffic=linear_backward_traffic,
    differentiable=(0, 1, 2, 5),
    autocast=(0, 1, 5),
    bench_shapes=BENCH_SHAPES,
    opaque=True,
    threads_matter=True,
    helpers=("linear_forward",),
    module=module,
    module_inputs=module_inputs,
)
