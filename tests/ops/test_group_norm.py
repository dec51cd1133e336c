"""Group norm beside torch's: statistics, layouts, the module, a model with replaced forwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkiln

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.cuda]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
def test_a_mean_far_from_0_loses_no_digits(device: str, last: bool) -> None:
    x = torch.randn(3, 12, 17, 19, device=device) + 3e4
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    expected = F.group_norm(x.double(), 4)
    found = torchkiln.group_norm(x, 4)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 24, 5, 3), (3, 40, 33, 65), (2, 6, 3), (5, 8)])
def test_the_layout_is_that_of_x(device: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device).movedim(1, -1).contiguous().movedim(-1, 1)
    x.requires_grad_()
    y = torchkiln.group_norm(x, 2, act="silu")
    assert y.movedim(1, -1).is_contiguous()
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert grad.movedim(1, -1).is_contiguous()
    plain = x.detach().contiguous().requires_grad_()
    other = torchkiln.group_norm(plain, 2, act="silu")
    (expected,) = torch.autograd.grad(other, plain, torch.ones_like(other))
    torch.testing.assert_close(y, other)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_the_module_is_torchs() -> None:
    theirs = nn.GroupNorm(3, 12, eps=1e-3)
    nn.init.normal_(theirs.weight)
    ours = torchkiln.nn.GroupNorm(3, 12, eps=1e-3, act="silu")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 12, 7)
    torch.testing.assert_close(ours(x), F.silu(theirs(x)))
    assert repr(ours) == f"{repr(theirs)[:-1]}, act='silu')"
    without = torchkiln.nn.GroupNorm(3, 12, bias=False)
    assert list(without.state_dict()) == ["weight"]
    torch.testing.assert_close(without(x), F.group_norm(x, 3))
    with pytest.raises(ValueError, match=r"torchkiln\.nn\.GroupNorm: act: got 'mish', expected"):
        torchkiln.nn.GroupNorm(3, 12, act="mish")  # type: ignore[arg-type]


def test_replace_takes_torchs_module() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), nn.GroupNorm(2, 12, affine=False)
    )
    x = torch.randn(2, 3, 9, 9)
    expected = model(x)
    report = torchkiln.replace(model)
    assert [report[name].now for name in ("1", "2")] == ["group_norm", "group_norm"]
    torch.testing.assert_close(model(x), expected)
