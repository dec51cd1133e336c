"""``torchkiln.replace``: linear layers with at least 512 inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import torchkiln
import torchkiln.patch.formula.linear as patched


class Wide(nn.Module):
    """A layer with rows that are not a multiple of 16 bytes, then an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.head = nn.Linear(512, 515), nn.ReLU(), nn.Linear(515, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.act(self.up(x)))
        return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_layers_of_unaligned_rows(dtype: torch.dtype) -> None:
    model = Wide().to(dtype)
    x = torch.randn(3, 512, dtype=dtype)
    expected = model(x)
    report = torchkiln.replace(model)
    up, head = report["up"], report["head"]
    assert (up.kind, up.now, up.bitwise) == ("linear", "linear", False)
    assert head.reason == "torch's product is as fast"
    assert report[""].now == "linear(relu) at up"
    error = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(model(x), expected, rtol=error, atol=error)
    torch.testing.assert_close(model.up(x), F.linear(x, model.up.weight, model.up.bias))
    report.undo()
    assert torch.equal(model(x), expected)
    assert torchkiln.replace(model, exact=True)["up"].reason == "not bitwise equal"


class Stored(nn.Parameter):
    """A subclass of Parameter, like a quantised weight of another library."""

    def __new__(cls, data: Tensor) -> Any:
        return Tensor._make_subclass(cls, data)


def test_weights_of_other_kinds_stay() -> None:
    model = Wide()
    torchkiln.replace(model)
    x = torch.randn(3, 512)
    expected = model(x)
    model.up.weight = Stored(model.up.weight.detach())  # set after the replacement
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    fresh = Wide()
    fresh.up.weight = Stored(fresh.up.weight.detach())
    report = torchkiln.replace(nn.Sequential(fresh, Wide()))
    assert report["0.up"].reason == "its parameters are no plain tensors"
    assert report["1.up"].changed


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shape of the weight in each call of the op."""
    found: list[torch.Size] = []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found.append(weight.shape)
        return torchkiln.linear(x, weight, bias)

    monkeypatch.setattr(patched, "linear", linear)
    return found


def test_a_bias_of_many_rows(calls: list[torch.Size]) -> None:
    layer = nn.Linear(512, 520)
    many, few = torch.randn(2048, 512), torch.randn(2047, 512)
    expected = layer(many)
    grads = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    assert torchkiln.replace(layer)[""].now == "linear"
    calls.clear()
    found = layer(many)
    assert calls == [(520, 512)]
    again = torch.autograd.grad(found.square().sum(), list(layer.parameters()))
    for one, other in zip((found, *again), (expected, *grads), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    layer(few)
    with torch.no_grad():
        layer(many)
    with torch.autocast("cpu"):
        layer(many)
    layer.bias.requires_grad_(False)
    layer(many)
    assert len(calls) == 1


def test_a_call_reads_weight_and_bias_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by ``nn.Module.__getattr__``, which would double the time of the checks."""
    layer = nn.Linear(512, 520)
    many = torch.randn(2048, 512)
    torchkiln.replace(layer)
    layer(many)
    reads: list[str] = []
    get: Any = nn.Module.__getattr__

    def counted(self: nn.Module, name: str) -> Any:
        reads.append(name)
        return get(self, name)

    monkeypatch.setattr(nn.Module, "__getattr__", counted)
    layer(many)
    assert not reads


def test_which_layers_are_replaced() -> None:
    for layer in (nn.Linear(512, 520, bias=False), nn.Linear(504, 520), nn.Linear(1024, 10)):
        assert torchkiln.replace(layer)[""].reason == "torch's product is as fast"


def test_compiled_layers_are_torchs(traced: Callable[..., set[str]]) -> None:
    layer = nn.Linear(515, 515)
    torchkiln.replace(layer)
    assert not any("kiln" in name for name in traced(layer, torch.randn(2048, 515)))


def added_one(layer: Any, x: Tensor) -> Tensor:
    """The forward of an adapter: adds 1."""
    return F.linear(x, layer.weight, layer.bias) + 1


@pytest.mark.parametrize("size", [64, 512])
def test_forwards_that_are_set_later_are_called(size: int) -> None:
    model = nn.Sequential(Wide(), nn.LayerNorm(16))
    model[0].up, model[0].head = nn.Linear(size, 515), nn.Linear(515, 16)
    x = torch.randn(3, size)
    torchkiln.replace(model)
    kept: Any = model[0].up
    kept.forward = lambda x: F.linear(x, kept.weight, kept.bias) + 1
    shifted = model[1](model[0].head(F.relu(F.linear(x, kept.weight, kept.bias) + 1)))
    torch.testing.assert_close(model(x), shifted)
    del kept.forward
    kept.__class__ = type("Later", (type(kept),), {"forward": added_one})
    torch.testing.assert_close(model(x), shifted)


def test_random_numbers_are_not_drawn() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    torchkiln.replace(nn.Linear(512, 513, device="meta"))
    assert torch.equal(torch.rand(2), expected)


def test_inputs_that_only_torch_takes() -> None:
    layer = nn.Linear(512, 513)
    torchkiln.replace(layer)
    parts = [torch.randn(2, 512), torch.randn(3, 512)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert layer(nested).size(0) == 2
    assert layer.to("meta")(torch.empty(4096, 512, device="meta")).shape == (4096, 513)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_of_a_layer() -> None:
    layer, x = nn.Linear(512, 512), torch.randn(2048, 512)
    torchkiln.replace(layer)
    torch.testing.assert_close(torch.jit.trace(layer, x)(x), layer(x))


def test_layers_without_a_weight_yet() -> None:
    lazy = nn.LazyLinear(512)
    assert torchkiln.replace(nn.Sequential(lazy))["0"].reason == "its parameters have no sizes yet"
    bare: Any = nn.Linear(512, 512)
    bare.weight = None
    assert not torchkiln.replace(bare)[""].changed


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_parametrizations_after_a_call() -> None:
    layer, x = nn.Linear(512, 513), torch.randn(4, 512)
    torchkiln.replace(layer)
    for name in ("weight", "bias"):
        parametrize.register_parametrization(layer, name, Twice())
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_a_layer_without_its_bias() -> None:
    layer = nn.Linear(512, 513)
    torchkiln.replace(layer)
    del layer.bias
    with pytest.raises(AttributeError, match="bias"):
        layer(torch.randn(4, 512))


@pytest.mark.parametrize(
    "x",
    [torch.randn(4, 512).double(), torch.randn(4, 511), torch.tensor(1.0)],
    ids=["dtype", "width", "number"],
)
def test_errors_are_those_of_torch(x: Tensor) -> None:
    layer = nn.Linear(512, 513)
    with pytest.raises(RuntimeError) as before:
        layer(x)
    torchkiln.replace(layer)
    with pytest.raises(RuntimeError) as after:
        layer(x)
    assert str(after.value) == str(before.value)
