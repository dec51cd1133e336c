"""``torchkiln.replace``: linear layers that are fused with the activations after them."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln
from torchkiln.patch.source import layer
from torchkiln.typing import Activation


class Approximate(nn.Module):
    """The tanh approximation of gelu, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


class QuickGelu(nn.Module):
    """The formula of Hugging Face's QuickGELUActivation."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Relu2(nn.Module):
    """The formula of Hugging Face's ReLUSquaredActivation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.square(F.relu(x))


class Inline(nn.Module):
    """A feed-forward layer whose forward is one expression."""

    def __init__(self, act: nn.Module | None = None, size: int = 16) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.act = act or nn.GELU()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.fc2(self.act(self.fc1(x)))
        return y * scale


class Steps(Inline):
    """``Inline`` with a statement per module, a dropout and a helper method."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = F.dropout(x, 0.1, self.training)
        return self.first(x) * scale

    def first(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(x)
        return y


class Returned(Inline):
    """The forward returns the result of the activation."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.fc1(x * scale)
        return self.act(y)


class Used(Inline):
    """The input of the activation is used again, so it is not fused."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.fc1(x)
        z = self.act(y)
        return (y + z) * scale


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activation of each fused call, in order."""
    calls: list[str] = []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation) -> Tensor:
        calls.append(act)
        return torchkiln.linear(x, weight, bias, act=act)

    monkeypatch.setattr(layer, "linear", linear)
    return calls


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x, scale=0.5)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    grads: Any = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    return [y, *(g for g in grads if g is not None)]


@pytest.mark.parametrize("cls", [Inline, Steps, Returned])
@pytest.mark.parametrize(
    ("act", "name"),
    [
        *((nn.GELU(), "gelu"), (nn.ReLU(), "relu"), (nn.SiLU(), "silu")),
        *((Approximate(), "gelu_tanh"), (QuickGelu(), "quick_gelu"), (Relu2(), "relu2")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_activation_becomes_part_of_the_layer(
    cls: type[Inline],
    act: nn.Module,
    name: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = nn.Sequential(cls(copy.deepcopy(act))).to(dtype).eval()
    x = torch.randn(3, 16, dtype=dtype, requires_grad=True)
    expected = outcome(model[0], x)
    report = torchkiln.replace(model)
    row = report["0"]
    assert (row.kind, row.now, row.changed) == ("mlp", f"linear({name}) at fc1", True)
    assert row.error_now is not None
    calls = counted(monkeypatch)
    found = outcome(model[0], x)
    assert calls == [name]
    error = 1e-7 if dtype == torch.float64 else 0.1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=error, atol=error)
    report.undo()
    assert type(model[0]) is cls
    assert torch.equal(outcome(model[0], x)[0], expected[0])


def test_other_layers_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.low = base, nn.Linear(16, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.base(x) + self.low(x)
            return y

    model, x = Inline(), torch.randn(3, 16)
    torchkiln.replace(model)
    calls = counted(monkeypatch)
    seen: list[Tensor] = []
    hook = model.fc1.register_forward_hook(lambda _m, _x, y: seen.append(y))
    model(x)
    hook.remove()
    assert (len(seen), calls) == (1, [])
    model.fc1 = Adapter(model.fc1)  # type: ignore[assignment]
    expected = model.fc2(F.gelu(model.fc1(x)))
    torch.testing.assert_close(model(x), expected)
    assert calls == []
    fresh = Inline()
    fresh.fc1 = Adapter(fresh.fc1)  # type: ignore[assignment]
    assert not [r for r in torchkiln.replace(fresh).rows if r.kind == "mlp"]


def test_what_is_left_alone() -> None:
    assert not [r for r in torchkiln.replace(Used()).rows if r.kind == "mlp"]
    assert not [r for r in torchkiln.replace(Inline(), exact=True).rows if r.kind == "mlp"]
    assert not [r for r in torchkiln.replace(Inline(), only=["norm"]).rows if r.kind == "mlp"]
    assert torchkiln.replace(Inline(nn.ReLU()), only=["mlp"])[""].changed
    assert not [r for r in torchkiln.replace(Inline(nn.ELU())).rows if r.kind == "mlp"]


def test_copies_pickles_and_compiled_models() -> None:
    model, x = Inline(Approximate()), torch.randn(3, 16)
    torchkiln.replace(model)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_a_layer_of_one_feature_is_no_gated_unit() -> None:
    """The result of layers with one feature does not change, as in a mixer of a single token."""
    model = nn.Sequential()
    model.fc1, model.act, model.fc2 = nn.Linear(1, 4), nn.GELU(), nn.Linear(4, 1)
    x = torch.randn(3, 1)
    expected = model(x)
    torchkiln.replace(model)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("cls", [Inline, Steps, Returned])
def test_the_activation_is_read_when_it_was(cls: type[Inline]) -> None:
    """The forward reads the attribute ``act`` at the same time as the original forward."""
    model, x = cls().eval(), torch.randn(3, 16)
    twin = copy.deepcopy(model)
    assert torchkiln.replace(model)[""].changed

    def exchange(owner: Inline, *_: Any) -> None:
        owner.act = nn.Tanh()

    for one in (model, twin):
        one.fc1.register_forward_hook(functools.partial(exchange, one))
    torch.testing.assert_close(model(x), twin(x))


@pytest.mark.parametrize("name", ["act", "fc1"])
@pytest.mark.parametrize("cls", [Inline, Steps, Returned])
def test_errors_are_those_of_torch(cls: type[Inline], name: str) -> None:
    model = cls().eval()
    twin = copy.deepcopy(model)
    torchkiln.replace(model)
    for one in (model, twin):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            one(torch.randn(3, 7))
        with pytest.raises(RuntimeError, match="same dtype"):
            one(torch.randn(3, 16).double())
        setattr(one, name, None)
        with pytest.raises(TypeError, match="not callable"):
            one(torch.randn(3, 16))


@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", [nn.GELU, nn.ReLU, QuickGelu])
def test_dtypes_under_autocast(of_x: torch.dtype, dtype: torch.dtype, act: type[nn.Module]) -> None:
    model = Returned(act()).to(dtype).eval()
    x = torch.randn(3, 16).to(of_x)

    def outcome() -> torch.dtype | str:
        with torch.autocast("cpu", torch.bfloat16):
            try:
                return model(x).dtype
            except RuntimeError:
                return "raises"

    expected = outcome()
    torchkiln.replace(model)
    assert outcome() == expected
