"""The contracts of the activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln
from torchkiln.testing import forms
from torchkiln.testing.data import normal
from torchkiln.testing.derive import layer
from torchkiln.testing.sample import Sample
from torchkiln.testing.spec import OpSpec


@dataclass(frozen=True)
class Formula:
    """An activation in plain torch, with bounds of its rounding errors."""

    value: Callable[[Tensor], Tensor]
    """The function of torch that a user would call."""
    exact: Callable[[Tensor], Tensor]
    """The same function with full float64 precision, also in the tails."""
    terms: Callable[[Tensor], Tensor]
    """The sum of the absolute values of the terms of the result."""
    slope_terms: Callable[[Tensor], Tensor]
    """The sum of the absolute values of the terms of the derivative."""
    curvature: float
    """A bound of the second derivative: the change of the derivative per error of the argument."""
    output_slope: Callable[[Tensor], Tensor] | None = None
    """|y| times the change of the derivative with y, if it is computed from the output y."""


def exact_gelu(z: Tensor) -> Tensor:
    """Uses erfc, which is precise where erf is near -1."""
    return z * torch.special.erfc(z * -math.sqrt(0.5)) / 2


def exact_gelu_tanh(z: Tensor) -> Tensor:
    """Uses the sigmoid, which is precise where tanh is near -1."""
    return z * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))


def density(z: Tensor) -> Tensor:
    """The density of the normal distribution."""
    return torch.exp(z * z / -2) / math.sqrt(2 * math.pi)


def gelu_tanh_slope_terms(z: Tensor) -> Tensor:
    """Bounds of the terms of s + z s (1 - s) 2 u', the derivative, with s = sigmoid(2 u)."""
    slope = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)
    return 1 + slope * exact_gelu_tanh(z).abs()


def silu_slope_terms(z: Tensor) -> Tensor:
    """The derivative is s + z s (1 - s)."""
    return torch.sigmoid(z) * (1 + z.abs())


def quick_gelu(z: Tensor) -> Tensor:
    """``z * sigmoid(1.702 z)``."""
    return z * torch.sigmoid(1.702 * z)


def rounded_sigmoid(z: Tensor) -> Tensor:
    """1 + |a| (1 - sigmoid(a)) with a = 1.702 z: the sigmoid's error from the rounding of a."""
    return 1 + 1.702 * z.abs() * torch.sigmoid(-1.702 * z)


def relu2(z: Tensor) -> Tensor:
    """``max(z, 0)**2``."""
    return torch.square(torch.relu(z))


def amplified(act: str, terms: Tensor) -> Tensor:
    """The magnitude of a result, given that of the argument; only squares amplify it."""
    return terms * terms if act in ("square", "relu2") else terms


gelu_tanh = partial(F.gelu, approximate="tanh")

FORMULAS: dict[str, Formula] = {
    "none": Formula(torch.clone, torch.clone, torch.abs, torch.ones_like, 0),
    "square": Formula(torch.square, torch.square, torch.square, lambda z: 2 * z.abs(), 2),
    "relu": Formula(torch.relu, torch.relu, torch.relu, lambda z: (z > 0).to(z.dtype), 0),
    "relu2": Formula(relu2, relu2, relu2, lambda z: 2 * torch.relu(z), 2),
    "gelu": Formula(F.gelu, exact_gelu, torch.abs, lambda z: 1 + z.abs() * density(z), 0.8),
    "gelu_tanh": Formula(gelu_tanh, exact_gelu_tanh, torch.abs, gelu_tanh_slope_terms, 0.8),
    "quick_gelu": Formula(
        quick_gelu,
        quick_gelu,
        lambda z: quick_gelu(z).abs() * rounded_sigmoid(z),
        lambda z: silu_slope_terms(1.702 * z) * rounded_sigmoid(z),
        1.702 * 0.5,
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
SHAPES: Mapping[str, tuple[int, ...]] = (
    {"typical": (6, 10), "one": (1,), "0-dim": ()}
    | {"empty": (0,), "empty in the middle": (3, 0, 2)}
    | {"prime": (7, 13), "vector less one": (127,), "vector": (128,), "vector and one": (129,)}
    | {"power of two less one": (1023,), "power of two and one": (1025,)}
    | {"images": (2, 3, 5, 7), "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3), "threads": (257, 521)}
)


def away_from_zero(x: Tensor) -> Tensor:
    """``x`` in a wider range and away from 0, where relu has no derivative."""
    return 2 * x + torch.where(x < 0, -0.25, 0.25).to(x.dtype)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """A call for each shape in SHAPES."""
    for name, shape in SHAPES.items():
        yield Sample(name, (away_from_zero(normal("x", shape, device, dtype)),))


Module = Callable[..., nn.Module] | None


def with_slope(slope: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function whose derivative is ``slope``."""
    return lambda x: x * slope(x.detach())


def activation(name: str, *, in_place: bool = False, module: Module = None) -> OpSpec:
    """The contract of one activation."""
    formula = FORMULAS[name]
    spec = OpSpec(
        op=getattr(torchkiln, name),
        reference=formula.exact,
        composite=formula.value,
        magnitude=formula.terms,
        gradient_magnitude=with_slope(formula.slope_terms),
        output_sensitivity=with_slope(formula.output_slope) if formula.output_slope else None,
        inputs=inputs,
        opaque=False,
        helpers=("_activation_backward",),
        module=None if module is None else layer(module),
    )
    return (
        forms.with_forms(spec, forms.in_place(getattr(torchkiln, f"{name}_"))) if in_place else spec
    )


SQUARE = activation("square", in_place=True)
RELU = activation("relu", in_place=True, module=torchkiln.nn.ReLU)
RELU2 = activation("relu2", module=torchkiln.nn.ReLU2)
GELU = activation("gelu", module=torchkiln.nn.GELU)
GELU_TANH = activation("gelu_tanh", module=partial(torchkiln.nn.GELU, "tanh"))
QUICK_GELU = activation("quick_gelu", module=torchkiln.nn.QuickGELU)
SILU = activation("silu", in_place=True, module=torchkiln.nn.SiLU)
SIGMOID = activation("sigmoid", in_place=True, module=torchkiln.nn.Sigmoid)
TANH = activation("tanh", in_place=True, module=torchkiln.nn.Tanh)
