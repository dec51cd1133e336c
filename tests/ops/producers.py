"""Helpers for tests of ops that write E4M3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchkiln
from torchkiln import Quantized, quantize

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ON_GPU = pytest.param("cuda", marks=pytest.mark.cuda)
DEVICES = ("cpu", *([ON_GPU] if torch.cuda.is_available() else []))
HAS_PRODUCT = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
PRODUCT_DEVICES = ("cpu", *([ON_GPU] if HAS_PRODUCT else []))
"""Devices on which torch multiplies E4M3 tensors."""


class Op(NamedTuple):
    """An op, and the op that writes the same result as E4M3."""

    plain: Callable[..., Any]
    quantizing: Callable[..., Any]


def draw(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same on each device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def carrier(found: Quantized) -> Tensor:
    """The tensor of a quantised result that carries its gradient."""
    assert found.source is not None
    return found.source


def parts(result: Any) -> tuple[Any, ...]:
    """The results of a call, as a tuple."""
    return result if type(result) is tuple else (result,)


def require_equal(found: Quantized, plain: Tensor) -> None:
    """Require quantize() of the plain result: its bits on a CPU, near them on a GPU."""
    expected = quantize(plain)
    assert found.data.dtype == torch.float8_e4m3fn
    assert found.data.is_contiguous()
    assert found.scale.shape == expected.scale.shape
    assert found.scale.stride() == expected.scale.stride()
    assert found.source is not None
    assert found.source.shape == plain.shape
    assert found.source.dtype == plain.dtype
    bytes_found, bytes_expected = (q.data.view(torch.uint8) for q in (found, expected))
    if not plain.is_cuda:
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(bytes_found, bytes_expected)
        return
    values, exact = (torchkiln.dequantize(q, torch.float64) for q in (found, expected))
    assert torch.equal(values.isnan(), exact.isnan())
    differs = values.nan_to_num() != exact.nan_to_num()
    assert differs.sum() <= 0.002 * differs.numel() + 1
    step = torch.maximum(values.abs(), exact.abs()) / 8
    smallest = found.scale.amax(-1, keepdim=True) * 2.0**-9 if plain.numel() else 0
    assert ((values - exact).abs().nan_to_num() <= step.nan_to_num() + smallest).all()


def require_like_plain(op: Op, args: tuple[Any, ...], **options: Any) -> None:
    """Require the plain op's results, and its gradients for the same incoming gradients."""
    inputs = [a.requires_grad_() for a in args if isinstance(a, Tensor)]
    expected = parts(op.plain(*args, **options))
    found = parts(op.quantizing(*args, **options))
    require_equal(found[0], expected[0].detach())
    for sum_found, sum_expected in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(sum_found, sum_expected)
    grads = [draw(*y.shape, device=y.device.type, dtype=y.dtype, seed=9) for y in expected]
    carriers = [found[0].source, *found[1:]]
    of_expected = torch.autograd.grad(expected, inputs, grads)
    of_found = torch.autograd.grad(carriers, inputs, grads)
    for one, other in zip(of_found, of_expected, strict=True):
        if one.is_cuda:
            assert_close(one, other)
        else:
            assert torch.equal(one, other)


def to_meta(value: Any) -> Any:
    """A tensor on the device meta; every other argument unchanged."""
    return value.to("meta") if isinstance(value, Tensor) else value
