"""``torchkiln.replace`` fuses batch norms as ``torchkiln.fuse`` does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.patch import Replacement


class Net(nn.Module):
    """Convolution and batch norm, a linear layer with an activation, and a sum before a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).mean((2, 3))
        x = x + self.fc2(self.act(self.fc1(x)))
        y: Tensor = self.norm(x)
        return y


class Mixed(nn.Module):
    """A linear layer, an activation and a batch norm in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.bn, self.relu = (
            nn.Linear(8, 8),
            nn.SiLU(),
            nn.BatchNorm1d(8),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.bn(self.act(self.fc(x))))
        return y


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    gradients = torch.autograd.grad(y.square().sum(), [*model.parameters()])
    return [y, *gradients, *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("make", [Net, Mixed])
def test_batch_norms_are_replaced_on_a_gpu(make: type[nn.Module], device: torch.device) -> None:
    model = make().to(device, torch.float64)
    name = "stem.1" if make is Net else "bn"
    twin = copy.deepcopy(model)
    report = torchkiln.replace(model)
    row = report[name]
    assert row.changed == (device.type == "cuda")
    assert row.changed or "torchkiln.fuse" in row.reason
    report.undo()
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    report = torchkiln.replace(model, only=[*torchkiln.patch.replacing.KINDS])
    assert report[name].now == ("conv_bn_act(relu)" if make is Net else "bn_act(relu)")
    order = [name for name, _ in model.named_modules()]
    assert list(report) == sorted(report, key=order.index)
    x = torch.randn((4, 3, 6, 6) if make is Net else (4, 8), device=device, dtype=torch.float64)
    right = outcome(twin, x)
    torch.testing.assert_close(outcome(model, x), right)
    report.undo()
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]


def test_options_decide() -> None:
    def now(model: nn.Module | None = None, **options: Any) -> Replacement:
        return torchkiln.replace(model or Net(), dry_run=True, **options)["stem.1"]

    assert now(only=["batch_norm"]).outcome == "would replace"
    assert now(only=["batch_norm"], skip=["stem.*"]).reason == "skip"
    assert not now(exact=True).changed
    with torch.device("meta"):
        model = Net()
    assert now(model).changed


def test_fused_modules_are_left_alone() -> None:
    model = Net()
    torchkiln.fuse(model)
    for again in (torchkiln.fuse(model), torchkiln.replace(model, only=["batch_norm"])):
        assert again["stem.1"].reason == "its module was replaced before"


def test_a_fused_activation_is_not_replaced_as_well() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU())
    report = torchkiln.replace(model, only=("batch_norm", "activation"))
    assert report["1"].now == "conv_bn_act(gelu)"
    assert report["2"].reason == "its formula is part of that of its parent"
    with torch.profiler.profile(acc_events=True) as profile:
        model(torch.randn(2, 3, 5, 5))
    assert "aten::batch_norm" not in {event.name for event in profile.events()}
