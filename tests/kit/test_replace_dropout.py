"""``torchkiln.replace``: dropouts before a residual sum and a norm."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.patch.source import residual

SIZE = 32


class Layer(nn.Module):
    """The submodules of the layers below."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.drop = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Dropout(0.3)


class Before(Layer):
    """The dropout is a separate statement, as in BERT."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        h = self.drop(h)
        h = self.norm(h + x)
        return h + 0 * x


class Returned(Layer):
    """The residual is on the left of the sum, and the norm is returned at once."""

    def forward(self, x: Tensor) -> Tensor:
        dropped = self.drop(self.mix(x))
        return self.norm(x + dropped)


class Inside(Layer):
    """The dropout is a part of the sum's expression."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(x))
        residual = x
        x = self.norm(x)
        return x + 0 * residual


class Nested(Layer):
    """Dropout, sum and norm are one expression."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(self.mix(x)) + x)


class Twice(Layer):
    """The result of the dropout is used again after the norm."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.mix(x))
        y: Tensor = self.norm(h + x)
        return y + h


class Between(Layer):
    """A statement between the dropout and the sum changes x."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.mix(x))
        x = x * 2
        return self.norm(h + x)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The probability of each call of dropout_add."""
    found: list[float] = []

    def counted(x: Tensor, to: Tensor, p: float) -> Tensor:
        found.append(p)
        return torchkiln.dropout_add(x, to, p)

    monkeypatch.setattr(residual, "dropout_add", counted)
    return found


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("make", [Before, Returned, Inside, Nested])
def test_dropouts_become_part_of_sums(
    make: type[Layer], device: torch.device, calls: list[float]
) -> None:
    model = nn.Sequential(make()).to(device)
    twin = copy.deepcopy(model)
    x = torch.randn(5, SIZE, device=device, requires_grad=True)
    evaluated = gradients(model.eval(), x)
    report = torchkiln.replace(model)
    assert report["0"].now == "dropout_add at drop, add_layer_norm at norm"
    torch.testing.assert_close(gradients(model, x), evaluated)
    assert not calls

    def expected(layer: Any, x: Tensor) -> Tensor:
        y: Tensor = layer.norm(torchkiln.dropout_add(layer.mix(x), x, layer.drop.p))
        return y

    layer: Any = twin[0].train()
    layer.forward = expected.__get__(layer)
    right = gradients(twin, x)
    for same in (model.train(), pickle.loads(pickle.dumps(model))):
        calls.clear()
        torch.testing.assert_close(gradients(same, x), right)
        assert calls == [0.3]
    calls.clear()
    report.undo()
    model(x)
    assert not calls


@pytest.mark.parametrize("make", [Twice, Between])
def test_dropouts_that_stay(make: type[Layer], calls: list[float]) -> None:
    model = nn.Sequential(make())
    x = torch.randn(5, SIZE, requires_grad=True)
    expected = gradients(model, x)
    assert torchkiln.replace(model)["0"].now == "add_layer_norm at norm"
    torch.testing.assert_close(gradients(model, x), expected)
    assert not calls


def test_the_numbers_stay_those_of_torch_if_results_must_be_exact() -> None:
    model = nn.Sequential(Before())
    report = torchkiln.replace(model, exact=True)
    assert "dropout_add" not in str(report)


def hooked(layer: Any) -> None:
    layer.drop.register_forward_hook(lambda *_: None)


def certain(layer: Any) -> None:
    layer.drop.p = 0.0


def in_place(layer: Any) -> None:
    layer.drop.inplace = True


def another(layer: Any) -> None:
    layer.drop = nn.AlphaDropout(0.3)


@pytest.mark.parametrize("make", [Before, Returned, Inside, Nested])
def test_a_dropout_that_is_removed_raises(make: type[Layer]) -> None:
    model = make()
    torchkiln.replace(model)
    model.drop = None  # type: ignore[assignment]
    with pytest.raises(TypeError, match="not callable"):
        model(torch.randn(2, SIZE))


@pytest.mark.parametrize("change", [hooked, certain, in_place, another])
def test_changed_dropouts_run_as_before(change: Any, calls: list[float]) -> None:
    model = nn.Sequential(Before())
    twin = copy.deepcopy(model)
    torchkiln.replace(model)
    x = torch.randn(5, SIZE, requires_grad=True)
    for one in (model, twin):
        change(one[0])
    torch.testing.assert_close(gradients(model, x), gradients(twin, x))
    assert not calls


def test_other_tensors_run_as_before(calls: list[float]) -> None:
    """dropout_add is not called for a sum of two dtypes, or in torch.compile, which fuses both."""
    model = nn.Sequential(Before())
    torchkiln.replace(model)
    layer: Any = model[0]
    layer.mix.register_forward_hook(lambda *args: args[-1].double())
    layer.norm.double()
    assert model(torch.randn(2, SIZE)).dtype == torch.float64
    model = nn.Sequential(Nested())
    torchkiln.replace(model)
    torch.compile(model, backend="eager")(torch.randn(2, SIZE))
    assert not calls
