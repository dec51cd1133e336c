"""softmax: dtypes of the result, and masks that are numbers to add."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln.testing import normal


def in_torch(x: Tensor, *, scale: float, mask: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The formula of softmax with a mask of numbers."""
    x = x if dtype is None else x.to(dtype)
    return torch.softmax(x * scale + mask, -1)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["eager", "compiled", "inference"])
def test_a_mask_of_numbers(how: str, kind: torch.dtype, dtype: torch.dtype | None) -> None:
    """A floating-point mask is added to the scaled input, and has a gradient."""
    cpu = torch.device("cpu")
    x, bias = normal("x", (3, 5, 7), cpu, kind), normal("bias", (5, 7), cpu)
    bias[:, 3] = -math.inf
    call = functools.partial(torchkiln.softmax, dim=-1, scale=0.5, dtype=dtype)
    inputs = (x.requires_grad_(), bias.requires_grad_())
    expected = in_torch(x.float(), scale=0.5, mask=bias, dtype=dtype)
    if how == "inference":
        with torch.inference_mode():
            found = call(x, mask=bias)
    else:
        made = torch.compile(call, backend="aot_eager") if how == "compiled" else call
        found = made(x, mask=bias)
        grads = torch.autograd.grad(found.square().sum(), inputs)
        assert [grad.dtype for grad in grads] == [kind, torch.float32]
        wanted = torch.autograd.grad(expected.square().sum(), inputs)
        torch.testing.assert_close(grads, wanted)
    assert found.dtype == (dtype or torch.float32)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("kind", [torch.int64, torch.float16])
def test_the_dtype_of_the_result(function: str, kind: torch.dtype) -> None:
    """With ``dtype`` the input is cast first, as in torch."""
    x = (3 * normal("x", (4, 9), torch.device("cpu"))).to(kind)
    found = getattr(torchkiln, function)(x, 1, dtype=torch.float32)
    expected = getattr(torch, function)(x, 1, dtype=torch.float32)
    torch.testing.assert_close(found, expected)
    batched = torch.vmap(lambda row: getattr(torchkiln, function)(row, 0, dtype=torch.float32))(x)
    torch.testing.assert_close(batched, expected)
    with pytest.raises(RuntimeError, match=r"softmax: dtype: got int64, expected one of float32"):
        getattr(torchkiln, function)(x, 1, dtype=torch.int64)
