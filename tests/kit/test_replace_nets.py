"""``torchkiln.replace`` and ``torchkiln.fuse`` in the nets of torchvision and timm."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.patch.replacing import KINDS

NETS = {
    "torchvision.models:resnet18": {},
    "torchvision.models:mobilenet_v3_small": {},
    "torchvision.models:efficientnet_b0": {},
    "torchvision.models:densenet121": {},
    "torchvision.models:vit_b_16": {"image_size": 32},
    "torchvision.models:convnext_tiny": {},
    "timm.models:resnet18": {},
    "timm.models:resnet26d": {},
    "timm.models:vit_tiny_patch16_224": {"img_size": 32},
    "timm.models:convnext_atto": {},
    "timm.models:mixer_s32_224": {"img_size": 32},
}
FUSED = ("resnet18", "resnet26d", "mobilenet_v3_small", "efficientnet_b0")
"""The nets in which ``fuse`` finds all batch norms."""


@pytest.fixture(params=NETS)
def net(request: pytest.FixtureRequest, device: torch.device) -> nn.Module:
    """A net of torchvision or timm; skips if the library is missing."""
    library, _, name = request.param.partition(":")
    pytest.importorskip(library.partition(".")[0])
    make: Callable[..., nn.Module] = getattr(importlib.import_module(library), name)
    net = make(num_classes=10, **NETS[request.param]).to(device, torch.float64)
    net.name = name
    return net


def outcome(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Logits, gradients and buffers of a training step, then the logits in eval mode."""
    torch.manual_seed(3)
    y = net.train()(x)
    gradients: Any = torch.autograd.grad(y.sin().sum(), [*net.parameters()], allow_unused=True)
    found = [y, *(g for g in gradients if g is not None), *(b.clone() for b in net.buffers())]
    with torch.no_grad():
        return [*found, net.eval()(x)]


def replace_all(net: nn.Module) -> Any:
    return torchkiln.replace(net, only=KINDS)


@pytest.fixture(autouse=True)
def reproducible() -> Iterator[None]:
    """Convolutions whose results repeat bit by bit."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield


@pytest.mark.parametrize("change", [torchkiln.fuse, replace_all])
def test_a_net_computes_the_same(net: nn.Module, change: Callable[[nn.Module], Any]) -> None:
    twin = copy.deepcopy(net)
    x = torch.randn(4, 3, 32, 32, device=next(net.parameters()).device, dtype=torch.float64)
    state = copy.deepcopy(net.state_dict())
    right = outcome(net, x)
    net.load_state_dict(state)
    report = change(net)
    norms = [row for row in report.rows if row.kind == "batch_norm"]
    if net.name in FUSED:
        assert norms
        assert all(row.changed for row in norms)
    if change is replace_all:
        assert report.changed
    torch.testing.assert_close(outcome(net, x), right)
    assert list(net.state_dict()) == list(state)
    loaded = copy.deepcopy(net)
    loaded.load_state_dict(state)
    torch.testing.assert_close(outcome(loaded, x), right)
    report.undo()
    assert [type(m) for m in net.modules()] == [type(m) for m in twin.modules()]
    net.load_state_dict(state)
    torch.testing.assert_close(outcome(net, x), right, rtol=0, atol=0)
