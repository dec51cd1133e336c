"""``torchkiln.replace``: residual sums before a branch, and forwards with decorators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_replace_residual import counted
from torch import Tensor, nn

import torchkiln


class After(nn.Module):
    """The submodules of the layers below."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.mix, self.cross, self.mlp = (nn.Linear(size, size) for _ in range(3))


class Branch(After):
    """A decoder layer with an optional part between a sum and a norm."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = x + self.mix(x)
        if other is not None:
            residual = x
            x = self.norm_1(x)
            x = residual + self.cross(x) * other
        residual = x
        x = self.norm_2(x)
        return residual + self.mlp(x)


class Reassigned(After):
    """A layer whose condition reads a copy of the sum's variable: it is not replaced."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        kept = total
        if kept is not None:
            x = kept * 2
        y: Tensor = self.norm_2(total)
        return x + y


class Walrus(After):
    """A layer whose sum sets the argument that the condition reads."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        total = x + (other := self.mix(x))
        if other is not None:
            total = total + other
        y: Tensor = self.norm_2(total)
        return y


class Truth(After):
    """A layer whose condition is a list to which the computation of the sum appends."""

    def grown(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(self.mix(x))
        return kept[-1]

    def forward(self, x: Tensor, kept: list[Tensor] | None = None) -> Tensor:
        kept = [] if kept is None else kept
        total = x + self.grown(x, kept)
        if kept:
            total = total + kept[-1]
        y: Tensor = self.norm_2(total)
        return y


def wrapped(forward: Any) -> Any:
    """A decorator whose wrapper calls the forward twice."""

    @functools.wraps(forward)
    def twice(self: nn.Module, x: Tensor) -> Tensor:
        forward(self, x)
        result: Tensor = forward(self, x)
        return result

    return twice


class Decorated(After):
    """A layer whose forward has a decorator that calls it twice."""

    @wrapped
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm_1(x + self.mix(x))
        return y


FORWARDS: list[Any] = []


def tagged(forward: Any) -> Any:
    """A decorator that sets an attribute of the forward."""
    forward.tag = 2
    return forward


def times_tag(forward: Any) -> Any:
    """A decorator whose wrapper multiplies by that attribute."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = forward(self, x) * forward.tag
        return y

    return wrapper


class Tagged(After):
    """A layer whose forward has an attribute that its decorator reads."""

    @times_tag
    @tagged
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm_1(x + self.mix(x))
        return y


def kept_elsewhere(forward: Any) -> Any:
    """A decorator whose wrapper reads the forward from a list."""
    FORWARDS.append(forward)

    @functools.wraps(forward)
    def wrapper(self: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = FORWARDS[-1](self, x)
        return y

    return wrapper


class Elsewhere(After):
    """A layer whose decorator does not hold the forward itself."""

    @kept_elsewhere
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm_1(x + self.mix(x))
        return y


def around(forward: Any) -> Any:
    """A decorator that calls the forward indirectly; it also holds an array and an unset name."""
    array = torch.ones(3)
    numbers: tuple[int, ...] = ()
    for unset in numbers:
        array = array + unset

    def call(self: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = forward(self, x)
        return y

    @functools.wraps(forward)
    def wrapper(self: nn.Module, x: Tensor) -> Tensor:
        assert callable(forward)
        return call(self, x) if array.dim() else x + unset

    return wrapper


class Around(After):
    """A layer whose decorator calls the forward through an inner function."""

    @around
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm_1(x + self.mix(x))
        return y


def outcome_of(model: nn.Module, x: Tensor, other: Tensor | None) -> list[Tensor]:
    """The result and the gradients; zeros for parameters of a branch that was not taken."""
    y = model(x, other)
    leaves = [x, *model.parameters()]
    grads = torch.autograd.grad(y.square().sum(), leaves, materialize_grads=True)
    return [y, *grads]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of fused calls, in order."""
    return counted(monkeypatch)


def test_a_branch_between_a_sum_and_a_norm(calls: list[str]) -> None:
    model = Branch().double()
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(3, 1, dtype=torch.float64)
    for other, count in ((None, 1), (gate, 2)):
        expected = outcome_of(model, x, other)
        report = torchkiln.replace(model)
        assert report[""].now == "add_layer_norm at norm_1, add_layer_norm at norm_2"
        calls.clear()
        found = outcome_of(model, x, other)
        assert len(calls) == count
        for one, with_op in zip(expected, found, strict=True):
            torch.testing.assert_close(with_op, one)
        report.undo()


@pytest.mark.parametrize("make", [Reassigned, Walrus, Truth])
def test_conditions_that_the_sum_may_change(make: type[nn.Module]) -> None:
    model = make().double()
    x = torch.randn(3, 32, dtype=torch.float64)
    expected = model(x)
    report = torchkiln.replace(model)
    assert not [row for row in report.rows if row.kind == "residual"]
    torch.testing.assert_close(model(x), expected)


def test_decorators_stay(calls: list[str], traced: Callable[..., set[str]]) -> None:
    model, x = Decorated(), torch.randn(3, 32)
    expected = model(x)
    assert torchkiln.replace(model)[""].now == "add_layer_norm at norm_1"
    torch.testing.assert_close(model(x), expected)
    assert len(calls) == 2
    assert any("add_layer_norm" in name for name in traced(model, x))
    assert inspect.signature(model.forward) == inspect.signature(Decorated().forward)


def test_attributes_of_a_forward_stay() -> None:
    model, x = Tagged(), torch.randn(3, 32)
    expected = model(x)
    assert torchkiln.replace(model)[""].now == "add_layer_norm at norm_1"
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("make", [Elsewhere, Around])
def test_other_decorators_keep_the_forward(make: type[nn.Module]) -> None:
    row = torchkiln.replace(make())[""]
    assert (row.changed, row.reason) == (False, "its forward is decorated")


class Named(nn.LayerNorm):
    """A norm whose subclasses need a keyword argument."""

    tag: str

    def __init_subclass__(cls, *, tag: str) -> None:
        cls.tag = tag


class Slotted(nn.LayerNorm):
    """A class with slots, whose layout in memory differs from that of other modules."""

    __slots__ = ("tag",)


def test_a_class_without_subclasses() -> None:
    model = nn.Sequential(nn.LayerNorm(8), Named(8), Slotted(8))
    report = torchkiln.replace(model)
    assert report["0"].changed
    assert report["1"].changed
    assert report["2"].reason.startswith("its class has no subclass: ")
    report.undo()
