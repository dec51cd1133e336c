"""``torchkiln.replace``: linear layers that read the same input."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import torchkiln
from torchkiln.patch.source import shared
from torchkiln.typing import Kind

SIZE = 512
NOW = "one sum of gradients for q, k, v"


class Layer(nn.Module):
    """Three layers for the same input, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.v, self.out = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)


class Attention(Layer):
    """Query, key and value, as in Hugging Face's models."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        shape = (*x.shape[:-1], -1, 64)
        q = self.q(x).view(shape) * scale
        k = self.k(x).view(shape)
        v = self.v(x).view(shape)
        y: Tensor = self.out((q.sigmoid() * k.tanh() * v).flatten(-2))
        return y


class Inline(Layer):
    """One statement calls all layers."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.q(x).sigmoid() * self.k(x) + self.v(x))
        return y


class Partial(Layer):
    """One of the outputs is detached."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q * k + v.detach()


class Changed(Layer):
    """The variable is assigned again between the calls."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.q(x)
        x = self.k(x)
        return self.v(x)


class Read(Layer):
    """Another call between reads the variable, and might change it."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        y = x.relu()
        k = self.k(x)
        return q + k + y


class Branch(Layer):
    """Some calls depend on a condition."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        k = self.k(x) if x.dim() > 1 else q
        if x.dim() > 5:
            k = self.v(x)
        return q + k


class Effects(Layer):
    """Methods that change the input or a layer between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(SIZE, SIZE)
        self.seen: list[str] = []

    def choose(self) -> None:
        """Exchange the layers k and other."""
        self.k, self.other = self.other, self.k

    def check(self, _: Tensor) -> Tensor:
        """Record the call and raise an error."""
        self.seen.append("check")
        raise KeyError

    @property
    def scale(self) -> float:
        """A property that doubles a weight when it is read."""
        with torch.no_grad():
            self.k.weight.mul_(2)
        return 2.0


class ThroughView(Effects):
    """The input is changed through a view between the calls."""

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, 0]
        q = self.q(x)
        h[:] = 0
        return q + self.k(x)


class ThroughName(Effects):
    """The input is changed through a second variable between the calls."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        q = self.q(x)
        h += 1
        return q + self.k(x)


class Exchanged(Effects):
    """A method exchanges a layer between the calls."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        self.choose()
        return q + self.k(x)


class Stored(Effects):
    """An assignment exchanges a layer between the calls."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        self.k = self.other
        return q + self.k(x)


class Property(Effects):
    """Reading a property changes a layer between the calls."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x) * self.scale
        return q + self.k(x)


class First(Effects):
    """The input is changed in place within the statement of the first call."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.mul_(2) + self.q(x)
        return q + self.k(x).mul_(2) + self.v(x)


class Raises(Effects):
    """A method raises an error between the calls."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.check(self.q(x))
        return q + self.k(x)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers in each shared call; inputs of any size are shared."""
    found: list[int] = []
    function: Any = shared.SharedInput.apply

    def counted(x: Tensor, *parameters: Tensor | None) -> Any:
        found.append(len(parameters) // 2)
        return function(x, *parameters)

    monkeypatch.setattr(shared.SharedInput, "apply", counted)
    monkeypatch.setattr(shared, "LEAST_INPUT", 1)
    return found


def outcome(model: nn.Module, x: Tensor, *, twice: bool) -> list[Tensor]:
    """The output and the gradients; with ``twice``, also those of second order."""
    y = model(x)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    first: Any = torch.autograd.grad(y.sin().sum(), leaves, create_graph=twice, allow_unused=True)
    if twice:
        total = torch.stack([g.square().sum() for g in first if g is not None]).sum()
        first += torch.autograd.grad(total, leaves, allow_unused=True)
    return [y, *(g for g in first if g is not None)]


@pytest.mark.parametrize("make", [Attention, Inline, Partial])
@pytest.mark.parametrize("frozen", [(), ("q.weight", "k.weight", "v.weight", "v.bias")])
def test_gradients_are_those_of_single_layers(
    make: type[Layer], frozen: tuple[str, ...], device: torch.device, calls: list[int]
) -> None:
    model = nn.Sequential(make()).to(device, torch.float64)
    for name in frozen:
        model[0].get_parameter(name).requires_grad_(False)
    x = torch.randn(2, 3, SIZE, device=device, dtype=torch.float64, requires_grad=True)
    right = [outcome(model, x, twice=twice) for twice in (True, False)]
    report = torchkiln.replace(model)
    assert report["0"].now == NOW
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls.clear()
        found = [outcome(same, x, twice=twice) for twice in (True, False)]
        torch.testing.assert_close(found, right)
        assert calls == [3, 3]
    report.undo()
    torch.testing.assert_close(outcome(model, x, twice=True), right[0], rtol=0, atol=0)


def test_the_outputs_are_those_of_torch_bit_for_bit(device: torch.device, calls: list[int]) -> None:
    model = nn.Sequential(Attention()).to(device, torch.bfloat16)
    x = torch.randn(4, SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
    expected = model(x)
    torchkiln.replace(model, only=["linear"])
    assert torch.equal(model(x), expected)
    assert calls == [3]


@pytest.mark.parametrize("make", [Changed, Read, Branch])
def test_calls_that_stay(make: type[Layer]) -> None:
    model = nn.Sequential(make())
    assert "one sum" not in str(torchkiln.replace(model))


@pytest.mark.parametrize(
    "make", [ThroughView, ThroughName, Exchanged, Stored, Property, First, Raises]
)
def test_effects_between_the_calls(make: type[Effects], calls: list[int]) -> None:
    model, twin = make(), make()
    twin.load_state_dict(model.state_dict())
    torchkiln.replace(model, only=["linear"])
    hook: Any = lambda module, *_: seen.append(module.weight.sum().item())  # noqa: E731
    results: list[Any] = []
    for one in (model, twin):
        seen: list[float] = []
        one.k.register_forward_hook(hook)
        x = torch.randn(2, SIZE, requires_grad=True, generator=torch.Generator().manual_seed(0))
        try:
            results.append((one(x * 1), seen, len(one.seen)))
        except KeyError:
            results.append((x, seen, len(one.seen)))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert not calls


class Normed(Layer):
    """A layer with norms of q and k, as in Qwen3."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(64), nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, 64)
        q = self.q_norm(self.q(x).view(shape)).transpose(0, 1)
        k = self.k_norm(self.k(x).view(shape)).transpose(0, 1)
        v = self.v(x).view(shape).transpose(0, 1)
        return q * k + v


@pytest.mark.parametrize("only", [["linear"], ["linear", "norm"]])
def test_norms_between_the_layers(only: list[Kind], calls: list[int]) -> None:
    model = nn.Sequential(Normed())
    x = torch.randn(2, SIZE, requires_grad=True)
    expected = outcome(model, x, twice=False)
    assert torchkiln.replace(model, only=only)["0"].now == NOW
    torch.testing.assert_close(outcome(model, x, twice=False), expected, rtol=1e-4, atol=1e-4)
    assert calls == [3]
    layer: Any = model[0]
    order: list[str] = []
    for name in ("q", "q_norm", "k"):
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: order.append(name))
    model(x)
    assert order == ["q", "q_norm", "k"]
    assert calls == [3]


class Zeroed(Layer):
    """The input is zeroed after the calls, before backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        q, k = self.q(x), self.k(x)
        x.mul_(0)
        return q * k


def test_frozen_layers_do_not_keep_their_input(calls: list[int]) -> None:
    model = Zeroed()
    x = torch.randn(2, SIZE, requires_grad=True)
    torchkiln.replace(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()
    model.requires_grad_(requires_grad=False)
    y = model(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad((model.q(x) * model.k(x)).sum(), x)
    torch.testing.assert_close(found, expected)
    assert calls == [2, 2]
    model.k.weight.requires_grad_()  # torch saves the input for k only
    model(x)
    assert calls == [2, 2]


@pytest.mark.parametrize("options", [{"exact": True}, {"only": ["norm"]}])
def test_options_that_leave_them(options: dict[str, Any]) -> None:
    assert "one sum" not in str(torchkiln.replace(nn.Sequential(Attention()), **options))


class Low(nn.Linear):
    """A linear layer whose forward is overridden, as an adapter's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def hooked(layer: Any) -> None:
    layer.k.register_forward_hook(lambda *args: args[-1] * 3)


def adapted(layer: Any) -> None:
    layer.k = Low(SIZE, SIZE)


@pytest.mark.parametrize("change", [hooked, adapted])
def test_changed_layers_are_called(change: Any, calls: list[int]) -> None:
    model = nn.Sequential(Attention())
    torchkiln.replace(model)
    torch.manual_seed(1)
    change(model[0])
    twin = nn.Sequential(Attention())
    torch.manual_seed(1)
    change(twin[0])
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, SIZE, requires_grad=True)
    torch.testing.assert_close(outcome(model, x, twice=False), outcome(twin, x, twice=False))
    assert not calls


def test_where_torchs_layers_run(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's layers run without gradients, under autocast, compiled, transformed, or if small."""
    model = nn.Sequential(Attention())
    torchkiln.replace(model)
    x = torch.randn(2, SIZE, requires_grad=True)
    model(x.detach())
    with torch.no_grad():
        model(x)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    torch.compile(model, backend="eager")(x)
    torch.func.vmap(model)(x)
    torch.func.grad(lambda x: model(x).sum())(x)
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent is not None
    assert not calls
    model(x)
    assert calls == [3]
    monkeypatch.setattr(shared, "LEAST_INPUT", x.numel() + 1)
    model(x)
    assert calls == [3]


def test_small_inputs_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the function would take longer than a pass over the gradients."""
    model = Attention()
    torchkiln.replace(model)
    x = torch.randn(2048, SIZE, requires_grad=True)
    expected = model(x)
    monkeypatch.setattr(shared.SharedInput, "apply", None)
    assert torch.equal(model(x), expected)


class Unit(nn.Module):
    """A gated linear unit."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(SIZE, hidden), nn.Linear(SIZE, hidden)
        self.down = nn.Linear(hidden, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


@pytest.mark.parametrize(("hidden", "count"), [(520, [2]), (521, [])])
def test_gate_and_up_share_an_input_unless_their_products_are_padded(
    hidden: int, count: list[int], calls: list[int]
) -> None:
    model = nn.Sequential(Unit(hidden)).double()
    x = torch.randn(2, SIZE, dtype=torch.float64, requires_grad=True)
    right = outcome(model, x, twice=False)
    assert torchkiln.replace(model)["0"].now == "swiglu between the projections"
    torch.testing.assert_close(outcome(model, x, twice=False), right)
    assert calls == count
