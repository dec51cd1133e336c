"""Models in ``channels_last`` with dimensions of size 1, and models whose code changes later."""

from __future__ import annotations

import copy
from collections.abc import Callable
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


def act(x: Tensor) -> Tensor:
    return F.relu(x)


def flat(x: Tensor) -> Tensor:
    """A function that raises for images in ``channels_last``."""
    return 2 * x.view(-1).view(x.shape)


class Base(nn.Module):
    """A module with a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def helper(self, x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    def shifted(x: Tensor) -> Tensor:
        return x - 1


class Child(Base):
    """A module that calls functions and methods."""

    def helper(self, x: Tensor) -> Tensor:
        return super().helper(2 * x)

    def forward(self, x: Tensor) -> Tensor:
        return act(self.shifted(self.helper(self.conv(x))))


class Net(nn.Module):
    """A model with a module of users."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.child = nn.Conv2d(3, 4, 3), Child()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.child(self.conv(x))
        return y


def second(_: nn.Module, x: Tensor) -> Tensor:
    return flat(x)


Patch = pytest.MonkeyPatch

CHANGES: dict[str, Callable[[Net, Patch], None]] = {
    "forward of a child's class": lambda _, p: p.setattr(Child, "forward", second),
    "forward of the model's class": lambda _, p: p.setattr(Net, "forward", second),
    "method": lambda _, p: p.setattr(Child, "helper", second),
    "method of a base": lambda _, p: p.setattr(Base, "helper", second),
    "static method": lambda _, p: p.setattr(Base, "shifted", staticmethod(flat)),
    "new method": lambda _, p: p.setattr(Child, "shifted", staticmethod(flat), raising=False),
    "call": lambda _, p: p.setattr(Child, "__call__", second, raising=False),
    "code of a method": lambda _, p: p.setattr(Base.helper, "__code__", two_arguments.__code__),
    "code of a function": lambda _, p: p.setattr(act, "__code__", flat.__code__),
    "function": lambda _, p: p.setitem(globals(), "act", flat),
    "method of an instance": lambda m, _: vars(m.child).update(helper=flat),
    "part of a convolution": lambda m, _: vars(m.child.conv).update(_conv_forward=convolved),
}


def two_arguments(_: nn.Module, x: Tensor) -> Tensor:
    return 2 * x.view(-1).view(x.shape)


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(flat(x), weight, bias)


@pytest.mark.parametrize("is_called", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_code_that_changes_later(change: str, is_called: bool, monkeypatch: Patch) -> None:
    """The original forward runs the new code."""
    model = Net().double()
    twin = copy.deepcopy(model)
    assert replaced(model)["channels_last"].changed
    if is_called:
        model(images())
    for one in (model, twin):
        CHANGES[change](one, monkeypatch)
    x = images()
    torch.testing.assert_close(model(x), twin(x), rtol=0, atol=0)
    if "instance" not in change and "convolution" not in change:
        monkeypatch.undo()
        assert vars(model)[KEPT] is None
        model(x)
        assert vars(model)[KEPT] is not None


NAMELESS: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x + 1,)
nameless = NAMELESS[0]


class Nameless(Pooled):
    """A model that calls a function that no name leads to."""

    def forward(self, x: Tensor) -> Tensor:
        return nameless(super().forward(x))


def test_functions_without_a_name() -> None:
    reason = replaced(Nameless().double())["channels_last"].reason
    assert reason.endswith("no name leads to <lambda>, which it calls")


def test_convolutions_with_a_method_of_their_own() -> None:
    model = Net().double()
    vars(model.child.conv).update(_conv_forward=convolved)
    reason = replaced(model)["channels_last"].reason
    assert reason == "its _conv_forward is an attribute of the instance"
