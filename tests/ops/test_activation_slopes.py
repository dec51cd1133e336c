"""Derivatives of activations against float64: all 16-bit numbers, and the tails of float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln.ops.gated import geglu_tanh

HALF = (torch.bfloat16, torch.float16)
CUBIC = 0.044715
LARGE = (1e10, 1e13, 1e15, 1e19, 1e20, 1e30, 3.4e38)


def sigmoid_gate(z: Tensor, argument: Tensor, slope: Tensor) -> Tensor:
    """The derivative of z sigmoid(argument), with the slope of the argument."""
    return torch.sigmoid(argument) * (1 + z * slope * torch.sigmoid(-argument))


def gelu(z: Tensor) -> Tensor:
    density = torch.exp(z * z / -2) / math.sqrt(2 * math.pi)
    return torch.special.erfc(z * -math.sqrt(0.5)) / 2 + z * density


def gelu_tanh(z: Tensor) -> Tensor:
    z = z.clamp(-30, 30)  # its derivative is 0 or 1 beyond, also in float64
    linear = 2 * math.sqrt(2 / math.pi)
    return sigmoid_gate(z, linear * (z + CUBIC * z**3), linear * (1 + 3 * CUBIC * z * z))


def silu(z: Tensor) -> Tensor:
    return sigmoid_gate(z, z, torch.ones_like(z))


def quick_gelu(z: Tensor) -> Tensor:
    return sigmoid_gate(z, 1.702 * z, torch.full_like(z, 1.702))


SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": silu,
}
every_slope = pytest.mark.parametrize("name", SLOPES)


def derivative(name: str, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    getattr(torchkiln, name)(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def error_and_truth(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    truth = SLOPES[name](x.cpu().double())
    return (derivative(name, x).cpu().double() - truth).abs(), truth


def rounding_of_terms(x: Tensor) -> Tensor:
    """The error of float32 terms near 1 that cancel, for |x| < 4; 0 in the tails."""
    return torch.where(x.abs() < 4, 3e-7, 0.0).cpu()


@every_slope
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_all_numbers_of_16_bits(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """Derivatives of all finite 16-bit numbers are rounded once, also subnormal ones."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)[bits.view(dtype).isfinite()].to(device)
    error, truth = error_and_truth(name, x)
    info = torch.finfo(dtype)
    size = truth.abs().clamp(min=info.smallest_normal)
    step = info.eps * torch.exp2(torch.floor(torch.log2(size)))
    wrong = ~(error <= 0.51 * step + rounding_of_terms(x))
    assert not wrong.any(), (x.cpu()[wrong], (error / step)[wrong])


@every_slope
def test_tails_of_float32(device: torch.device, name: str) -> None:
    """The relative error is 4 eps, and 2 eps more per unit of the exponent; subnormals included."""
    x = torch.cat([torch.linspace(-limit, limit, 20001) for limit in (15, 110)]).to(device)
    error, truth = error_and_truth(name, x)
    info = torch.finfo(torch.float32)
    exponent = truth.abs().clamp(min=info.smallest_normal * info.eps).log().abs()
    allowed = info.eps * (4 + 2 * exponent) * truth.abs() + rounding_of_terms(x)
    wrong = ~(error <= allowed + 2 * info.smallest_normal * info.eps)
    assert not wrong.any(), (x.cpu()[wrong], error[wrong], truth[wrong])


@every_slope
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_0_and_1_far_from_zero(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """Derivatives are exactly 1 and 0 up to the largest number, whose square overflows."""
    x = torch.tensor(LARGE, dtype=torch.float64).to(dtype).to(device).repeat(9)
    x = x[x.isfinite()]
    assert (derivative(name, x) == 1).all()
    assert (derivative(name, -x) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_relu2_as_torch(device: torch.device, dtype: torch.dtype) -> None:
    """Gradients equal torch's for NaN, infinities, zeros and overflow of x and of the gradient."""
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -1.5, 2e19, 1e200, 1e-30]
    values = torch.tensor(special, dtype=torch.float64).to(dtype).to(device)
    x, grad = torch.cartesian_prod(values, values).unbind(-1)
    results = []
    for op in (torchkiln.relu2, lambda t: torch.square(torch.relu(t))):
        leaf = x.clone().requires_grad_()
        y = op(leaf)
        results.append((y, *torch.autograd.grad(y, leaf, grad)))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    y = results[0][0]
    assert not y[~y.isnan()].signbit().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ops_that_contain_gelu_tanh(device: torch.device, dtype: torch.dtype) -> None:
    """Gradients of ops with gelu_tanh are exactly 0 or 1 where the cube of x overflows."""
    x = torch.tensor([1e15, -1e15, 1e30, -1e30], device=device).to(dtype).repeat(3, 1)
    slope = torch.tensor([1.0, 0, 1, 0], device=device, dtype=dtype).repeat(3, 1)
    one = torch.ones_like(x)
    bias = torch.zeros(4, device=device, dtype=dtype)
    weight = torch.eye(4, device=device, dtype=dtype)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "bias_act": lambda t: torchkiln.bias_act(t, bias, act="gelu_tanh"),
        "geglu_tanh": lambda t: geglu_tanh(t, one),
        "linear": lambda t: torchkiln.linear(t, weight, act="gelu_tanh"),
    }
    for name, call in calls.items():
        leaf = x.clone().requires_grad_()
        call(leaf).sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, slope), name
