"""The contracts of the bias and activation family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.spec import Invalid, OpSpec, Sample, Traffic
from torchkiln.testing.specs.activation import FLOATING, FORMULAS, SPARSE

if TYPE_CHECKING:
    from collections.abc import Iterator

# Each shape of x, whose last dimension is the length of bias: one row and one column, no row and no
# column, every vector tail, narrow and wide rows, many rows (the bias gradient is a sum over them).
SHAPES: dict[str, tuple[int, ...]] = {
    "one": (1,),
    "one row": (1, 37),
    "one column": (41, 1),
    "no rows": (0, 5),
    "no columns": (5, 0),
    "empty in the middle": (3, 0, 4),
    "prime": (7, 13),
    "vector less one": (3, 127),
    "vector": (3, 128),
    "vector and one": (3, 129),
    "power of two less one": (5, 1023),
    "power of two and one": (5, 1025),
    "rank 3": (2, 3, 17),
    "images": (2, 3, 5, 7),
    "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3),
    "many narrow rows": (4099, 3),
    "one wide row": (40961,),
    "threads": (513, 260),
}


def away_from_zero(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    """``x`` with signs such that x * scale has the sign of bias.

    relu has no derivative at 0, and where the sum nearly cancels two correct implementations may
    stand on different sides of it.
    """
    direction = torch.where(bias.double() < 0, -1.0, 1.0) * (1 if scale >= 0 else -1)
    # Every third element of x has the other sign and enough weight to outdo the bias.
    third = torch.arange(x.numel(), device=x.device).reshape(x.shape) % 3 == 0
    outdone = -(2 * bias.double().abs() / abs(scale) + x.double().abs() + 0.25)
    return (direction * torch.where(third, outdone, x.double().abs() + 0.25)).to(x.dtype)


def sample(name: str, x: Tensor, bias: Tensor, scale: float, act: str) -> Sample:
    """A call at values where every activation is smooth."""
    x = away_from_zero(x, bias, scale)
    return Sample(f"{name}, {act}", (x, bias), {"scale": scale, "act": act})


def bias_act_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every activation at one shape, every shape at relu and one more, scales, mixed dtypes."""

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
    yield Sample("by position", (away_from_zero(x, bias, 0.5), bias, 0.5, "silu"))
    if dtype in (torch.float16, torch.bfloat16):
        wide = normal("bias", (21,), device, torch.float32)
        for act in ("relu", "gelu"):
            yield sample("float32 bias", x, wide, 0.7, act)
        many = normal("x", (1031, 67), device, dtype)
        yield sample("float32 bias, many rows", many, normal("bias", (67,), device), 0.7, "tanh")


def bias_act_invalid(device: torch.device) -> Iterator[Invalid]:
    """Every refusal of bias_act."""
    prefix = r"torchkiln\.bias_act: "
    x = torch.ones(2, 4, device=device, requires_grad=True)
    bias = torch.ones(4, device=device, requires_grad=True)

    def case(name: str, x: object, bias: object, message: str) -> Invalid:
        return Invalid(name, (x, bias), RuntimeError, prefix + message)

    nothing = "got NoneType, expected a torch\\.Tensor"
    yield Invalid("x None", (None, bias), TypeError, prefix + "x: " + nothing)
    yield Invalid("bias None", (x, None), TypeError, prefix + "bias: " + nothing)
    yield Invalid(
        "unknown activation",
        (x, bias, 1.0, "swish"),
        ValueError,
        prefix + f"act: got 'swish', expected one of {', '.join(FORMULAS)}",
    )
    yield Invalid(
        "activation None",
        (x, bias, 1.0, None),
        TypeError,
        prefix + "act: got NoneType, expected a str",
    )
    yield case(
        "bias too short",
        x,
        bias[:3],
        r"bias: got shape \[3\], expected \[4\], the last dimension of x",
    )
    yield case(
        "bias of length 1",
        x,
        bias[:1],
        r"bias: got shape \[1\], expected \[4\], the last dimension of x",
    )
    yield case("2-D bias", x, x, r"bias: got shape \[2, 4\], expected 1 dimension")
    yield case("0-dim bias", x, bias[0], r"bias: got shape \[\], expected 1 dimension")
    yield case(
        "0-dim x", bias[0], bias, "x: got a 0-dimensional tensor, expected at least 1 dimension"
    )
    for dtype in (torch.int64, torch.bool, torch.complex64):
        name = str(dtype).removeprefix("torch.")
        yield case(f"{name} x", x.detach().to(dtype), bias, f"x: got dtype {name}, {FLOATING}")
    yield case(
        "float64 bias",
        x,
        bias.double(),
        "bias: got dtype float64, expected float32, the dtype of x",
    )
    yield case(
        "float32 bias beside float64",
        x.double(),
        bias,
        "bias: got dtype float32, expected float64, the dtype of x",
    )
    yield case(
        "bfloat16 bias beside float16",
        x.half(),
        bias.bfloat16(),
        "bias: got dtype bfloat16, expected float16, the dtype of x, or float32",
    )
    yield case("sparse x", x.detach().to_sparse(), bias, "x: " + SPARSE)
    yield case("sparse bias", x, bias.detach().to_sparse(), "bias: " + SPARSE)
    yield case(
        "meta bias",
        x,
        bias.detach().to("meta"),
        f"bias: got device meta, expected {x.device}, the device of x",
    )
    if device.type != "cpu":
        yield case(
            "bias on the CPU",
            x,
            bias.detach().cpu(),
            f"bias: got device cpu, expected {x.device}, the device of x",
        )


def bias_act_reference(x: Tensor, bias: Tensor, scale: float = 1.0, act: str = "relu") -> Tensor:
    """The formula."""
    return FORMULAS[act].exact(x * scale + bias)


def bias_act_composite(x: Tensor, bias: Tensor, scale: float = 1.0, act: str = "relu") -> Tensor:
    """The three ops that a user would write."""
    return FORMULAS[act].value(x * scale + bias).to(x.dtype)


def bias_act_magnitude(x: Tensor, bias: Tensor, scale: float = 1.0, act: str = "relu") -> Tensor:
    """|x * scale| + |bias|, which no activation but the square amplifies."""
    terms = (x * scale).abs() + bias.abs()
    return terms * terms if act == "square" else terms


ROUNDING = 2.0**-21
"""Of a sum of two terms that are computed with in float32, and more."""


def bias_act_gradient_magnitude(
    x: Tensor, bias: Tensor, scale: float = 1.0, act: str = "relu"
) -> Tensor:
    """The activation's own terms, and what the rounding of its argument does to its derivative."""
    formula = FORMULAS[act]
    z = x * abs(scale) + bias
    with torch.no_grad():
        terms = (x * scale).abs() + bias.abs()
        argument = x * scale + bias
        slope = formula.slope_terms(argument) + formula.curvature * terms
        if act == "relu":  # within its rounding of the jump either side is right
            slope = torch.where(argument.abs() <= ROUNDING * terms, 2.0**52, slope)
    return z * slope


def bias_act_bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A matrix of activations."""
    x = torch.randn(shape, device=device, dtype=dtype)
    bias = torch.randn(shape[1:], device=device, dtype=dtype)
    return Sample("bench", (x, bias), {"scale": 1.7})


def bias_act_large(device: torch.device) -> Sample:
    """A matrix of more than 2**31 elements."""
    rows, columns = 2**16 + 1, 2**15 + 1
    x = torch.arange(rows, device=device).remainder(251).sub(99).to(torch.bfloat16).unsqueeze(1)
    bias = torch.arange(columns, device=device).remainder(241).to(torch.bfloat16)
    return Sample("large", (x.expand(rows, columns).contiguous(), bias), {"scale": 0.5})


def act_of(sample: Sample) -> str:
    """The activation of a call."""
    act: str = sample.args[3] if len(sample.args) > 3 else sample.kwargs.get("act", "relu")
    return act


def bias_act_traffic(sample: Sample) -> Traffic:
    """Reads x and bias, writes the output."""
    x, bias = sample.args[:2]
    return Traffic(2 * x.numel() * x.itemsize + bias.numel() * bias.itemsize, 3 * x.numel())


def bias_act_backward_traffic(sample: Sample) -> Traffic:
    """Reads the incoming gradient, writes those of x and bias; reads what the derivative needs.

    That is a bit per element for relu, x and bias for the others, and nothing without activation.
    """
    x, bias = sample.args[:2]
    whole, row = x.numel() * x.itemsize, bias.numel() * bias.itemsize
    act = act_of(sample)
    saved = 0 if act == "none" else x.numel() // 8 if act == "relu" else whole + row
    return Traffic(2 * whole + row + saved, 3 * x.numel())


def module(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A module with a bias that is not zero."""
    layer = torchkiln.nn.BiasAct(21, "gelu", scale=0.7, device=device, dtype=dtype)
    with torch.no_grad():
        layer.bias.copy_(normal("bias", (21,), device, dtype))
    return layer


def module_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows for :func:`module`."""
    return (normal("x", (9, 21), device, dtype),)


BIAS_ACT = OpSpec(
    name="bias_act",
    op=torchkiln.bias_act,
    overload=torch.ops.torchkiln.bias_act.default,
    reference=bias_act_reference,
    composite=bias_act_composite,
    magnitude=bias_act_magnitude,
    gradient_magnitude=bias_act_gradient_magnitude,
    inputs=bias_act_inputs,
    invalid=bias_act_invalid,
    bench=bias_act_bench,
    large=bias_act_large,
    traffic=bias_act_traffic,
    backward_traffic=bias_act_backward_traffic,
    differentiable=(0, 1),
    opaque=True,
    autocast=(0,),
    helpers=("bias_act_forward", "bias_act_backward"),
    module=module,
    module_inputs=module_inputs,
)
