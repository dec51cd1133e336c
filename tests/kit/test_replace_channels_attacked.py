"""Models in ``channels_last`` with dimensions of size 1, and models whose code changes later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln
from torchkiln.patch import trial
from torchkiln.patch.graph.unchanged import KEPT


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which channels_last is faster."""
    monkeypatch.setattr(trial, "seconds_of_model", lambda _, __, f: [2.0, *(1.9 for _ in f[1:]), 1])
    monkeypatch.setattr(trial.Trial, "times", lambda *_: [2.0, 1.0])
    torch.manual_seed(0)


def images(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, 8, 8)), dtype=torch.float64)


def replaced(model: nn.Module, x: Tensor | None = None) -> torchkiln.patch.Report:
    x = images() if x is None else x
    return torchkiln.replace(model, example=x, only="channels_last")


class Pooled(nn.Module):
    """A convolution and a pool."""

    def __init__(self, channels: int = 4, inputs: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.conv(x), 4)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("inputs", [1, 3])
@pytest.mark.parametrize("sizes", [(2, 8, 8), (2, 4, 4), (2, 4, 8), (1, 4, 4), (0, 8, 8)])
def test_dimensions_of_size_1(channels: int, inputs: int, sizes: tuple[int, ...]) -> None:
    """Results and gradients have the strides of the original forward."""
    model = Pooled(channels, inputs).double()
    twin = copy.deepcopy(model)
    assert replaced(model, images(2, inputs, 8, 8))["channels_last"].changed
    x = images(sizes[0], inputs, *sizes[1:]).requires_grad_()
    results = [one(x) for one in (model, twin)]
    grads = [torch.autograd.grad((y * y).sum(), x)[0] for y in results]
    torch.testing.assert_close(*results, check_stride=True)
    torch.testing.assert_close(*grads, check_stride=True)


def test_an_argument_with_other_strides_in_dimensions_of_size_1() -> None:
    """The original forward decides what follows from such strides."""
    model = Pooled(inputs=1).double()
    twin = copy.deepcopy(model)
    assert replaced(model, images(2, 1, 8, 8))["channels_last"].changed
    x = images(2, 1, 8, 8).as_strided((2, 1, 8, 8), (64, 1, 8, 1))
    torch.testing.assert_close(model(x), twin(x), rtol=0, atol=0, check_stride=True)


class Swapped(Pooled):
    """Contiguous results for 1 image only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1)


def test_results_that_are_contiguous_by_chance() -> None:
    row = replaced(Swapped().double(), images(1, 3, 8, 8))["channels_last"]
    assert row.reason == "its results are no contiguous tensors"


class Within(nn.Module):
    """A model that has no proof, and a part that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Pooled(), nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x).permute(0, 2, 3, 1)
        return y


@pytest.mark.parametrize("make", [Pooled, Within])
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_trial_leaves_no_conditions(
    make: Any, dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would keep parts of the model alive."""
    times = trial.seconds_of_model
    monkeypatch.undo()
    clock = trial.seconds_of_model
    monkeypatch.setattr(trial, "MODEL_BUDGET", 0.01)
    monkeypatch.setattr(trial, "seconds_of_model", lambda *a: clock(*a) and times(*a))
    model = make().double()
    report = torchkiln.replace(
        model, example=images(), dry_run=dry_run, only=["batch_norm", "channels_last"]
    )
    assert len(report.changed) == 1
    assert not any(KEPT in vars(part) for part in model.modules())
    model(images())
    report.undo()
    assert not any(KEPT in vars(part) for part in model.modules())
