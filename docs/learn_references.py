"""Inputs of the steps of docs/learn, and their results in float64 with error bounds."""

from __future__ import annotations

from typing import Any

import torch
from learn_launches import EPS, SCALE
from torch import Tensor

import torchkiln

Inputs = tuple[Tensor, ...]
Size = tuple[int, ...]
Bounded = tuple[Tensor, Tensor]
"""A result in float64, and the error that each of its elements may have."""


def normal(*shapes: Size, dtype: torch.dtype, device: str) -> Inputs:
    """Random tensors."""
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def plain(size: Size, dtype: torch.dtype, device: str) -> Inputs:
    """One random tensor."""
    return normal(size, dtype=dtype, device=device)


def with_columns(size: Size, dtype: torch.dtype, device: str) -> Inputs:
    """A matrix, and a vector as long as its rows."""
    return normal(size, size[1:], dtype=dtype, device=device)


def rounded(truth: Tensor, magnitude: Tensor, dtype: torch.dtype, extra: float = 0.0) -> Bounded:
    """A result with a bound of two roundings of its terms, and `extra` for the additions."""
    return truth, magnitude.abs() * (torch.finfo(dtype).eps + extra)


def bias_relu_reference(x: Tensor, bias: Tensor) -> Bounded:
    """relu(x * scale + bias); step 1 rounds three times."""
    product, shift = x.double() * SCALE, bias.double()
    return rounded((product + shift).relu(), product.abs() + shift.abs(), x.dtype)


def residual_reference(x: Tensor, bias: Tensor, residual: Tensor) -> Bounded:
    """The same, and the residual."""
    truth, bound = bias_relu_reference(x, bias)
    other = residual.double()
    return truth + other, bound + other.abs() * torch.finfo(x.dtype).eps


def whole_numbers(size: Size, dtype: torch.dtype, device: str) -> Inputs:
    """Numbers whose sums are exact in float32 in any order, for the sizes below."""
    return (torch.randint(-8, 9, size, device=device).to(dtype),)


def exact(truth: Tensor) -> Bounded:
    """A result without an error."""
    return truth, torch.zeros_like(truth)


def norm_inputs(size: Size, dtype: torch.dtype, device: str) -> Inputs:
    """Rows whose mean is far from zero, weight and bias."""
    x, weight, bias = normal(size, size[1:], size[1:], dtype=dtype, device=device)
    return x + 3, weight, bias


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Bounded:
    """The layer norm.

    Step 1 adds the terms of a row, whose mean is 3, one by one. The roundings of n partial sums
    give the mean an error of 0.9 * sqrt(n) steps (standard deviation); the bound is 4.6 of them.
    """
    wide, shift = x.double(), bias.double()
    product = torch.nn.functional.layer_norm(wide, wide.shape[1:], eps=EPS) * weight.double()
    extra = max(1e-5, x.shape[1] ** 0.5 * torch.finfo(torch.float32).eps * 4)
    return rounded(product + shift, product.abs() + shift.abs() + 1, x.dtype, extra)


def rms_reference(x: Tensor, weight: Tensor, _: Tensor) -> Bounded:
    """The RMS norm."""
    wide = x.double()
    truth = torch.nn.functional.rms_norm(wide, wide.shape[1:], weight.double(), EPS)
    return rounded(truth, truth, x.dtype, 1e-5)


def gradient_inputs(size: Size, dtype: torch.dtype, device: str) -> Inputs:
    """Rows, a weight and the gradient of the result."""
    return normal(size, size[1:], size, dtype=dtype, device=device)


def gradient_reference(x: Tensor, weight: Tensor, grad: Tensor) -> Bounded:
    """The gradient of x of the RMS norm."""
    leaf = x.double().requires_grad_()
    with torch.enable_grad():
        y = torch.nn.functional.rms_norm(leaf, leaf.shape[1:], weight.double(), EPS)
        (truth,) = torch.autograd.grad(y, leaf, grad.double())
    rstd = (leaf.detach().square().mean(1, keepdim=True) + EPS).rsqrt()
    terms = (grad.double() * weight.double()).abs()
    normal_x = leaf.detach().abs() * rstd
    magnitude = rstd * (terms + normal_x * (terms * normal_x).mean(1, keepdim=True))
    return rounded(truth, magnitude, x.dtype, 1e-5)


def product_inputs(size: Size, dtype: torch.dtype, device: str) -> Inputs:
    """Matrices of m x k and n x k."""
    m, n, k = size
    return normal((m, k), (n, k), dtype=dtype, device=device)


def product_reference(a: Tensor, b: Tensor) -> Bounded:
    """The product of a and the transpose of b, with sums in float32."""
    wide_a, wide_b = a.double(), b.double()
    truth, bound = rounded(wide_a @ wide_b.T, wide_a @ wide_b.T, a.dtype)
    return truth, bound + 2e-6 * (wide_a.abs() @ wide_b.abs().T)


def linear_inputs(size: Size, dtype: torch.dtype, device: str) -> Inputs:
    """a, b and a bias for the columns of the result."""
    return (*product_inputs(size, dtype, device), *normal(size[1:2], dtype=dtype, device=device))


def linear_reference(a: Tensor, b: Tensor, bias: Tensor) -> Bounded:
    """relu(a b^T + bias)."""
    truth, bound = product_reference(a, b)
    shift = bias.double()
    return (truth + shift).relu(), bound + shift.abs() * torch.finfo(a.dtype).eps


def dequantized(found: tuple[Tensor, ...]) -> Tensor:
    """The numbers times their scales; exact in float32."""
    data, scale = found[:2]
    return (data.float().unflatten(1, (-1, 128)) * scale[:, :, None]).flatten(1)


def quantize_reference(x: Tensor) -> Bounded:
    """The rounding of torch, with the smallest powers of two that bring a block to at most 448."""
    parts = x.double().unflatten(1, (-1, 128))
    largest = parts.abs().amax(2, keepdim=True) / 448
    mantissa, exponent = torch.frexp(largest)
    scale = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())
    numbers = (parts / scale).float().to(torch.float8_e4m3fn).double()
    return exact((numbers * scale).flatten(1))


def fp8_inputs(size: Size, dtype: torch.dtype, device: str) -> Any:
    """a, b, and b quantised."""
    a, b = product_inputs(size, dtype, device)
    return a, b, torchkiln.quantize_weight(b)


def fp8_reference(a: Tensor, _: Tensor, weight: Any) -> Bounded:
    """The product of the quantised factors; tensor cores add E4M3 with few bits."""
    wide = torchkiln.dequantize(torchkiln.quantize(a)).double()
    other = torchkiln.dequantize(weight).double()
    truth, bound = rounded(wide @ other.T, wide @ other.T, a.dtype)
    return truth, bound + 1e-3 * (wide.abs() @ other.abs().T)
