"""Norms with round="input": normalized rows are rounded before weight and bias are applied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.sample import FLOATING

EPS = 1e-6
SHAPES = ((7, 13), (64, 128), (5, 1025), (3, 17001), (1, 200003))
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=str)
every_norm = pytest.mark.parametrize("norm", [torchkiln.rms_norm, torchkiln.layer_norm])


def slope_of(
    function: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor
) -> tuple[Tensor, Tensor]:
    value, slope, *_ = torch.func.jvp(function, (x,), (tangent,))
    return value, slope


@every_norm
@every_dtype
@every_shape
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
def test_the_weight_is_applied_to_rounded_rows(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    weight_dtype: torch.dtype | None,
    norm: Callable[..., Tensor],
) -> None:
    if dtype == torch.float64 and weight_dtype is not None:
        pytest.skip("float32 parameters belong to half precision")
    x = torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(shape[1], device=device).to(weight_dtype or dtype)
    rows = norm(x, shape[1], eps=EPS)  # no weight: rounded once
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = (rows.to(wide) * (weight.to(wide) + 0.5)).to(dtype)
    found = norm(x, shape[1], weight, eps=EPS, offset=0.5, round="input")
    assert torch.equal(found, expected)
    if dtype in (torch.float16, torch.bfloat16):
        assert not torch.equal(found, norm(x, shape[1], weight, eps=EPS, offset=0.5))


@every_norm
@every_dtype
def test_gradients_are_those_of_one_rounding(
    device: torch.device, dtype: torch.dtype, norm: Callable[..., Tensor]
) -> None:
    x = torch.randn(9, 64, device=device).to(dtype)
    weight, grad = torch.randn(64, device=device).to(dtype), torch.randn_like(x)
    found = []
    for rounding in ("once", "input"):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = norm(leaves[0], 64, leaves[1], round=rounding)
        found.append(torch.autograd.grad(out, leaves, grad))
    for once, rounded in zip(*found, strict=True):
        assert torch.equal(once, rounded)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_transforms(device: torch.device, dtype: torch.dtype, norm: Callable[..., Tensor]) -> None:
    """Transforms have the kernel's values; their derivatives do not differentiate the rounding."""
    x = torch.randn(3, 9, 64, device=device).to(dtype)
    weight, tangent = torch.randn(64, device=device).to(dtype), torch.randn_like(x)

    def rounded(x: Tensor) -> Tensor:
        return norm(x, 64, weight, round="input", eps=EPS)

    step = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(torch.vmap(rounded)(x), rounded(x), rtol=step, atol=1e-6)
    value, slope = slope_of(rounded, x, tangent)
    torch.testing.assert_close(value, rounded(x), rtol=step, atol=1e-6)
    _, expected = slope_of(
        lambda x: norm(x, 64, weight.double(), eps=EPS), x.double(), tangent.double()
    )
    bound = 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (slope.double() - expected).abs().max() <= bound
