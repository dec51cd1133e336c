"""A half precision and a float32 tensor in one call: no copy of the narrower one is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

import torchkiln


class Pair(NamedTuple):
    """An op of two tensors, and its formula in torch's ops."""

    op: Callable[[Tensor, Tensor], Tensor]
    formula: Callable[[Tensor, Tensor], Tensor]
    spread: bool = False
    """Whether the rows of the second tensor are probabilities."""


PAIRS = {
    "add_rms_norm": Pair(
        lambda x, y: torchkiln.add_rms_norm(x, y, x.shape[-1], eps=1e-6)[0],
        lambda x, y: F.rms_norm(x + y, x.shape[-1:], eps=1e-6),
    ),
    "add_layer_norm": Pair(
        lambda x, y: torchkiln.add_layer_norm(x, y, x.shape[-1])[0],
        lambda x, y: F.layer_norm(x + y, x.shape[-1:]),
    ),
    "dropout_add": Pair(lambda x, y: torchkiln.dropout_add(x, y, 0.0), lambda x, y: x + y),
    "bias_dropout_add": Pair(
        lambda x, y: torchkiln.bias_dropout_add(x, x.new_ones(x.shape[-1]), y, 0.0),
        lambda x, y: (x.float() + 1) + y,
    ),
    "swiglu": Pair(torchkiln.swiglu, lambda x, y: F.silu(x.float()) * y),
    "geglu": Pair(torchkiln.geglu, lambda x, y: F.gelu(x.float()) * y),
    "cross_entropy": Pair(
        lambda x, y: torchkiln.cross_entropy(x, y, reduction="none"),
        lambda x, y: F.cross_entropy(x.float(), y.float(), reduction="none"),
        spread=True,
    ),
}


def casts(call: Callable[[], object]) -> list[str]:
    """The names of all casts in a call."""
    kind = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind], acc_events=True) as profile:
        call()
    return [event.name for event in profile.events() if event.name == "aten::_to_copy"]


@pytest.mark.parametrize("columns", [21, 64], ids=["elements", "vectors"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("first_is_wide", [False, True], ids=["half first", "float32 first"])
@pytest.mark.parametrize("name", PAIRS)
def test_two_dtypes_are_read_without_a_copy(
    device: torch.device, name: str, first_is_wide: bool, half: torch.dtype, columns: int
) -> None:
    pair = PAIRS[name]
    dtypes = (torch.float32, half) if first_is_wide else (half, torch.float32)
    x, y = (torch.randn(37, columns, device=device).to(dtype) for dtype in dtypes)
    if pair.spread:
        y = y.float().softmax(-1).to(y.dtype)
    assert casts(lambda: x.to(y.dtype)) == ["aten::_to_copy"]
    found = pair.op(x, y)
    assert found.dtype == torch.float32
    assert casts(lambda: pair.op(x, y)) == []
    assert_close(found, pair.formula(x.float(), y.float()))


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_have_the_dtypes_of_the_inputs(device: torch.device, name: str) -> None:
    pair = PAIRS[name]
    x = torch.randn(37, 64, device=device).bfloat16().requires_grad_()
    y = torch.randn(37, 64, device=device).softmax(-1).requires_grad_()
    found = torch.autograd.grad(pair.op(x, y).square().sum(), (x, y))
    expected = torch.autograd.grad(pair.formula(x.float(), y).square().sum(), (x, y))
    for grad, wanted, tensor in zip(found, expected, (x, y), strict=True):
        assert grad.dtype == tensor.dtype
        assert_close(grad, wanted)
