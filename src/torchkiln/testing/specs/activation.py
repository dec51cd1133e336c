"""The contracts of the activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.spec import Invalid, OpSpec, Sample, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Formula:
    """An activation in plain torch, and what rounding inside it is proportional to."""

    value: Callable[[Tensor], Tensor]
    """Torch's."""
    exact: Callable[[Tensor], Tensor]
    """The same with all digits in float64, in its tails, too."""
    terms: Callable[[Tensor], Tensor]
    """The sum of the absolute values of the terms of the result."""
    slope_terms: Callable[[Tensor], Tensor]
    """The same of the derivative."""
    curvature: float
    """A bound of the second derivative: how an error of the argument shows in the first."""
    output_slope: Callable[[Tensor], Tensor] | None = None
    """Where the derivative is taken from the output y: |y| times the derivative's change with y."""


def exact_gelu(z: Tensor) -> Tensor:
    """By the complement of the error function: 1 + erf has no digits left where erf is near -1."""
    return z * torch.special.erfc(z * -math.sqrt(0.5)) / 2


def exact_gelu_tanh(z: Tensor) -> Tensor:
    """By the sigmoid, for the same reason."""
    return z * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))


def density(z: Tensor) -> Tensor:
    """Of the normal distribution."""
    return torch.exp(z * z / -2) / math.sqrt(2 * math.pi)


def gelu_tanh_slope_terms(z: Tensor) -> Tensor:
    """Torch adds tanh to 1; the other term is the argument's slope times z s (1 - s)."""
    slope = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)
    return 1 + slope * exact_gelu_tanh(z).abs()


def silu_slope_terms(z: Tensor) -> Tensor:
    """The derivative is s + z s (1 - s)."""
    return torch.sigmoid(z) * (1 + z.abs())


FORMULAS: dict[str, Formula] = {
    "none": Formula(torch.clone, torch.clone, torch.abs, torch.ones_like, 0),
    "square": Formula(torch.square, torch.square, torch.square, lambda z: 2 * z.abs(), 2),
    "relu": Formula(torch.relu, torch.relu, torch.relu, lambda z: (z > 0).to(z.dtype), 0),
    "gelu": Formula(F.gelu, exact_gelu, torch.abs, lambda z: 1 + z.abs() * density(z), 0.8),
    "gelu_tanh": Formula(
        partial(F.gelu, approximate="tanh"),
        exact_gelu_tanh,
        torch.abs,
        gelu_tanh_slope_terms,
        0.8,
    ),
    "silu": Formula(F.silu, F.silu, lambda z: F.silu(z).abs(), silu_slope_terms, 0.5),
    "sigmoid": Formula(
        torch.sigmoid,
        torch.sigmoid,
        torch.sigmoid,
        lambda z: 2 * torch.sigmoid(z),
        0.1,
        lambda z: torch.sigmoid(z) * (1 - 2 * torch.sigmoid(z)).abs(),
    ),
    "tanh": Formula(
        torch.tanh,
        torch.tanh,
        lambda z: torch.tanh(z).abs(),
        lambda z: 1 + torch.tanh(z) ** 2,
        0.8,
        lambda z: 2 * torch.tanh(z) ** 2,
    ),
}

# The scalar loop, the vector loop with every tail, more dimensions than collapse, and enough
# elements for several threads or blocks.
SHAPES: dict[str, tuple[int, ...]] = {
    "typical": (6, 10),
    "one": (1,),
    "0-dim": (),
    "empty": (0,),
    "empty in the middle": (3, 0, 2),
    "prime": (7, 13),
    "vector less one": (127,),
    "vector": (128,),
    "vector and one": (129,),
    "power of two less one": (1023,),
    "power of two and one": (1025,),
    "images": (2, 3, 5, 7),
    "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3),
    "threads": (257, 521),
}


def away_from_zero(x: Tensor) -> Tensor:
    """``x`` with a distance from 0, where relu has no derivative, and a wider range."""
    return 2 * x + torch.where(x < 0, -0.25, 0.25).to(x.dtype)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Shapes."""
    for name, shape in SHAPES.items():
        yield Sample(name, (away_from_zero(normal("x", shape, device, dtype)),))


FLOATING = "expected one of float32, float64, float16, bfloat16"
SPARSE = r"got layout Sparse, expected Strided; call \.to_dense\(\) first"


def invalid(name: str, device: torch.device) -> Iterator[Invalid]:
    """Every refusal of an activation."""
    prefix = rf"torchkiln\.{name}: x: "
    x = torch.ones(4, device=device)
    yield Invalid("None", (None,), TypeError, prefix + r"got NoneType, expected a torch\.Tensor")
    for dtype in (torch.int64, torch.bool, torch.complex64):
        kind = str(dtype).removeprefix("torch.")
        yield Invalid(kind, (x.to(dtype),), RuntimeError, f"{prefix}got dtype {kind}, {FLOATING}")
    sparse = torch.eye(4, device=device).to_sparse()
    yield Invalid("sparse", (sparse,), RuntimeError, prefix + SPARSE)


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A matrix."""
    return Sample("bench", (torch.randn(shape, device=device, dtype=dtype),))


def large(device: torch.device) -> Sample:
    """A matrix of more than 2**31 elements."""
    rows, columns = 2**16 + 1, 2**15 + 1
    x = torch.arange(rows, device=device).remainder(251).sub(99).div(25).to(torch.bfloat16)
    return Sample("large", (x.unsqueeze(1).expand(rows, columns).contiguous(),))


def traffic(sample: Sample) -> Traffic:
    """Reads the input, writes the output."""
    (x,) = sample.args
    return Traffic(2 * x.numel() * x.itemsize, x.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """Reads the incoming gradient and the input or output, writes the gradient."""
    (x,) = sample.args
    return Traffic(3 * x.numel() * x.itemsize, x.numel())


def with_slope(slope: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function whose derivative is ``slope``."""
    return lambda x: x * slope(x.detach())


def module_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """One matrix."""
    return (normal("x", (9, 21), device, dtype),)


def activation(
    name: str,
    *,
    in_place: bool = False,
    module: Callable[[], nn.Module] | None = None,
) -> OpSpec:
    """The contract of one activation."""
    formula = FORMULAS[name]
    ops = torch.ops.torchkiln
    return OpSpec(
        name=name,
        op=getattr(torchkiln, name),
        overload=getattr(ops, name).default,
        reference=formula.exact,
        composite=formula.value,
        magnitude=formula.terms,
        gradient_magnitude=with_slope(formula.slope_terms),
        output_sensitivity=with_slope(formula.output_slope) if formula.output_slope else None,
        inputs=inputs,
        invalid=partial(invalid, name),
        bench=bench,
        large=large,
        traffic=traffic,
        backward_traffic=backward_traffic,
        differentiable=(0,),
        opaque=False,
        helpers=("activation_backward",),
        inplace=getattr(torchkiln, f"{name}_") if in_place else None,
        inplace_overload=getattr(ops, f"{name}_").default if in_place else None,
        module=None if module is None else lambda *_: module(),
        module_inputs=None if module is None else module_inputs,
    )


SQUARE = activation("square", in_place=True)
RELU = activation("relu", in_place=True, module=torchkiln.nn.ReLU)
GELU = activation("gelu", module=torchkiln.nn.GELU)
GELU_TANH = activation("gelu_tanh", module=partial(torchkiln.nn.GELU, "tanh"))
SILU = activation("silu", in_place=True, module=torchkiln.nn.SiLU)
SIGMOID = activation("sigmoid", in_place=True, module=torchkiln.nn.Sigmoid)
TANH = activation("tanh", in_place=True, module=torchkiln.nn.Tanh)
