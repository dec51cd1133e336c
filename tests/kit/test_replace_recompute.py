"""torchkiln.replace(recompute=True): backward computes gated units again."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import torchkiln
from torchkiln.patch.formula import gated_plan


class Gated(nn.Module):
    """A gated unit with a dropout before its last layer."""

    def __init__(self, *, bias: bool = False, p: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 40, bias=bias), nn.Linear(16, 40, bias=bias)
        self.drop, self.down = nn.Dropout(p), nn.Linear(40, 16, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(nn.functional.silu(self.gate(x)) * self.up(x)))


class Packed(nn.Module):
    """A gated unit with one layer for gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(16, 80), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, -1)
        return self.down(nn.functional.gelu(gate) * up)


def replaced(net: nn.Module, **options: Any) -> nn.Module:
    """A copy with a gated unit of torchkiln."""
    made = copy.deepcopy(net)
    assert len(torchkiln.replace(made, only="glu", **options).changed) == 1
    return made


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    """The result and all gradients."""
    leaves = [x.clone().requires_grad_(), *net.parameters()]
    y = net(leaves[0])
    return [y, *torch.autograd.grad(y.square().sum(), leaves)]


NETS = [Gated(), Gated(bias=True), Packed()]


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """The memory of the products that are computed."""
    found: list[StorageWeakRef] = []
    compute = gated_plan.product

    def watched(*args: Any) -> Tensor:
        h = compute(*args)
        found.append(StorageWeakRef(h.untyped_storage()))
        return h

    monkeypatch.setattr(gated_plan, "product", watched)
    return found


@pytest.mark.parametrize("net", NETS, ids=["gated", "bias", "packed"])
@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_not_kept(
    net: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    storages: list[StorageWeakRef],
) -> None:
    net = copy.deepcopy(net).to(device, dtype)
    x = torch.randn(shape, device=device, dtype=dtype)
    plain, light = replaced(net), replaced(net, recompute=True)
    expected, found = gradients(plain, x), gradients(light, x)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    storages.clear()
    results = [plain(x), light(x)]
    assert [storage.expired() for storage in storages] == [False, True]
    del results


def test_the_report() -> None:
    report = torchkiln.replace(Packed(), recompute=True)
    assert report.changed[0].now == "geglu between the projections, again in backward"


def test_second_derivatives(device: torch.device) -> None:
    net = Gated(bias=True).to(device, torch.float64)
    x = torch.randn(4, 16, device=device, dtype=torch.float64)

    def both(net: nn.Module) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), *net.parameters()]
        first = torch.autograd.grad(net(leaves[0]).square().sum(), leaves, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        return [*first, *torch.autograd.grad(total, leaves)]

    torch.testing.assert_close(both(replaced(net, recompute=True)), both(net))


def test_a_dropout_before_the_layer(storages: list[StorageWeakRef]) -> None:
    net, x, found = Gated(p=0.5), torch.randn(4, 16), []
    for options in ({}, {"recompute": True}):
        torch.manual_seed(0)
        found.append(gradients(replaced(net, **options), x))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    light = replaced(net, recompute=True).eval()
    storages.clear()
    y = light(x)
    assert [storage.expired() for storage in storages] == [True]
    y.sum().backward()


def test_autocast(device: torch.device) -> None:
    net, x = Gated().to(device), torch.randn(4, 16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y, light = replaced(net)(x), replaced(net, recompute=True)
        again = light(x)
    assert torch.equal(y, again)
    again.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in light.parameters())


def halve(_: nn.Module, inputs: tuple[Tensor]) -> None:
    inputs[0].detach().mul_(0.5)


def test_a_hook_that_changes_the_product() -> None:
    found = []
    net, x = Gated().double(), torch.randn(4, 16, dtype=torch.float64)
    for options in ({}, {"recompute": True}):
        made: Any = replaced(net, **options)
        made.down.register_forward_pre_hook(halve)
        found.append(gradients(made, x))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class SparseDown(nn.Linear):
    """A layer that saves a tensor without storage."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.detach().to_sparse()
        return torch.sparse.mm(weight, x.flatten(0, -2).t()).t().reshape(*x.shape[:-1], -1)


class Accumulating(torch.autograd.Function):
    """A product that adds the weight's gradient to an attribute of the parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(grad.flatten(0, -2).t() @ x.flatten(0, -2))
        return grad @ weight, None


class AccumulatingDown(nn.Linear):
    """A layer whose backward needs the parameter itself."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Accumulating.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


@pytest.mark.parametrize("cls", [SparseDown, AccumulatingDown])
def test_layers_of_other_classes_save_what_they_save(cls: type[nn.Linear]) -> None:
    net, x = Gated(), torch.randn(4, 16)
    net.down = cls(40, 16, bias=False)
    found = []
    for options in ({}, {"recompute": True}):
        made: Any = replaced(net, **options)
        made.down.weight.main_grad = torch.zeros(16, 40)
        made(x).square().sum().backward()
        found.append([made.down.weight.main_grad, made.gate.weight.grad, made.up.weight.grad])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_changed_factor_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[Tensor] = []
    take = gated_plan.Gated.factors

    def watched(self: Any, *args: Any) -> tuple[Tensor, Tensor]:
        factors[:] = take(self, *args)
        return factors[0], factors[1]

    monkeypatch.setattr(gated_plan.Gated, "factors", watched)
    net: Any = replaced(Gated(), recompute=True)
    y = net(torch.randn(4, 16))
    factors[0].detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), net.down.weight)


def test_checkpoints_and_other_hooks() -> None:
    net, x = Gated(), torch.randn(4, 16)
    expected = gradients(net, x)[1:]
    light = replaced(net, recompute=True)
    leaves = [x.clone().requires_grad_(), *light.parameters()]
    y = checkpoint(light, leaves[0], use_reentrant=False)
    torch.testing.assert_close(list(torch.autograd.grad(y.square().sum(), leaves)), expected)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        light(x)


def test_torch_compile() -> None:
    net, x = replaced(Gated(), recompute=True), torch.randn(4, 16)
    compiled: Any = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), net(x))


def test_copies_pickles_and_undo(storages: list[StorageWeakRef]) -> None:
    net = Gated()
    report = torchkiln.replace(net, recompute=True)
    for made in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        storages.clear()
        y = made(torch.randn(4, 16))
        gc.collect()
        assert [storage.expired() for storage in storages] == [True]
        y.sum().backward()
    report.undo()
    assert type(net) is Gated
