"""The contracts of the bias and activation family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.activation import FORMULAS, amplified

# Shapes of x; the last size is the length of bias: one row and one column, no row and no column,
# every vector tail, narrow and wide rows, many rows (the bias gradient is a sum over rows).
SHAPES: Mapping[str, tuple[int, ...]] = (
    {"one": (1,), "one row": (1, 37), "one column": (41, 1), "no rows": (0, 5)}
    | {"no columns": (5, 0), "empty in the middle": (3, 0, 4), "prime": (7, 13)}
    | {"vector less one": (3, 127), "vector": (3, 128), "vector and one": (3, 129)}
    | {"power of two less one": (5, 1023), "power of two and one": (5, 1025), "rank 3": (2, 3, 17)}
    | {"images": (2, 3, 5, 7), "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3), "many narrow rows": (4099, 3)}
    | {"one wide row": (40961,), "threads": (513, 260)}
)


def away_from_zero(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    """``x`` with values such that x * scale + bias is not close to 0.

    relu has no derivative at 0, and two correct implementations may round to different sides of 0
    where the sum nearly cancels.
    """
    direction = torch.where(bias.double() < 0, -1.0, 1.0) * (1 if scale >= 0 else -1)
    # A third of the products x * scale have the opposite sign of the bias, and more than twice its
    # magnitude. The other products have the sign of the bias.
    third = torch.arange(x.numel(), device=x.device).reshape(x.shape) % 3 == 0
    outdone = -(2 * bias.double().abs() / abs(scale) + x.double().abs() + 0.25)
    return (direction * torch.where(third, outdone, x.double().abs() + 0.25)).to(x.dtype)


def sample(name: str, x: Tensor, bias: Tensor, scale: float, act: str) -> Sample:
    """A call at values where every activation is smooth."""
    x = away_from_zero(x, bias, scale)
    return Sample(f"{name}, {act}", (x, bias), {"scale": scale, "act": act})


def bias_act_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each activation, each shape for two of them, scales, and mixed dtypes."""

    def rows(*shape: int) -> tuple[Tensor, Tensor]:
        return normal("x", shape, device, dtype), normal("bias", shape[-1:], device, dtype)

    acts = ["relu", *(act for act in FORMULAS if act != "relu")]
    for act in acts:
        yield sample("typical", *rows(6, 10), 1.7, act)
    for i, (name, shape) in enumerate(SHAPES.items()):
        yield sample(name, *rows(*shape), 1.7, "relu")
        yield sample(name, *rows(*shape), -0.6, acts[1 + i % (len(acts) - 1)])
    x, bias = rows(9, 21)
    yield Sample("no scale", (away_from_zero(x, bias, 1.0), bias))
    yield Sample("in the order of the schema", (away_from_zero(x, bias, 0.5), bias, 0.5, "silu"))
    if dtype in (torch.float16, torch.bfloat16):
        wide = normal("bias", (21,), device, torch.float32)
        for act in ("relu", "gelu"):
            yield sample("float32 bias", x, wide, 0.7, act)
        many = normal("x", (1031, 67), device, dtype)
        yield sample("float32 bias, many rows", many, normal("bias", (67,), device), 0.7, "tanh")


def bias_act_invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with shapes of bias that do not match x."""
    x, bias = torch.ones(2, 4, device=device), torch.ones(4, device=device)
    good = GoodCall(torch.ops.torchkiln.bias_act.default, Sample("good", (x, bias)))
    words = "bias: got shape {}, expected [4], the last dimension of x"
    for shape, wrong in {"[3]": bias[:3], "[1]": bias[:1], "[2, 4]": x, "[]": bias[0]}.items():
        yield good.changed(words.format(shape), bias=wrong)
    words = "x: got a 0-dimensional tensor, expected at least 1 dimension"
    yield good.changed(words, x=bias[0])


def bias_act_reference(x: Tensor, bias: Tensor, scale: float = 1.0, act: str = "relu") -> Tensor:
    """The formula of the op in plain torch."""
    return FORMULAS[act].exact(x * scale + bias)


def bias_act_composite(x: Tensor, bias: Tensor, scale: float = 1.0, act: str = "relu") -> Tensor:
    """The three ops that a user would write."""
    return FORMULAS[act].value(x * scale + bias).to(x.dtype)


def bias_act_magnitude(x: Tensor, bias: Tensor, scale: float = 1.0, act: str = "relu") -> Tensor:
    """|x * scale| + |bias|, amplified by the activation."""
    return amplified(act, (x * scale).abs() + bias.abs())


ROUNDING = 2.0**-21
"""More than the relative rounding of a sum of two terms in float32."""


def bias_act_gradient_magnitude(
    x: Tensor, bias: Tensor, scale: float = 1.0, act: str = "relu"
) -> Tensor:
    """A function whose gradients sum absolute values, with the effect of a rounded argument."""
    formula = FORMULAS[act]
    z = x * abs(scale) + bias
    with torch.no_grad():
        terms = (x * scale).abs() + bias.abs()
        argument = x * scale + bias
        slope = formula.slope_terms(argument) + formula.curvature * terms
        if act == "relu":  # within the rounding error of 0 either derivative is right
            slope = torch.where(argument.abs() <= ROUNDING * terms, 2.0**52, slope)
    return z * slope


def bias_act_backward_traffic(sample: Sample) -> Traffic:
    """Reads the incoming gradient and writes the gradients of x and bias.

    The derivative also reads one bit per element for relu, or x and bias for other activations.
    """
    x, bias = sample.args[:2]
    act = sample.args[3] if len(sample.args) > 3 else sample.kwargs.get("act", "relu")
    saved = 0 if act == "none" else x.numel() // 8 if act == "relu" else x.nbytes + bias.nbytes
    return Traffic(2 * x.nbytes + bias.nbytes + saved, 3 * x.numel())


BIAS_ACT = OpSpec(
    op=torchkiln.bias_act,
    reference=bias_act_reference,
    composite=bias_act_composite,
    magnitude=bias_act_magnitude,
    gradient_magnitude=bias_act_gradient_magnitude,
    inputs=bias_act_inputs,
    refusals=Refusals(parameters={"bias": "x"}, words={"act": tuple(FORMULAS)}),
    invalid=bias_act_invalid,
    operations=(3, 3),
    backward_traffic=bias_act_backward_traffic,
    opaque=True,
    autocast=(0,),
    helpers=("_bias_act_forward", "_bias_act_backward"),
    module=layer(torchkiln.nn.BiasAct, 10, act="gelu", scale=0.7),
)
