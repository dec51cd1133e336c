"""torchkiln.fuse: max pools, results that are computed again, and gradients of two branches."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import torchkiln
from torchkiln.patch import recompute
from torchkiln.patch.recompute import Input


class Bottleneck(nn.Module):
    """As those of torchvision's ResNets."""

    def __init__(self, channels: int, middle: int, *, projects: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if projects:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Net(nn.Module):
    """A ResNet of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks = (Bottleneck(16, 8), Bottleneck(16, 8), Bottleneck(16, 8, projects=True))
        self.layer = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.maxpool(self.relu(self.bn1(self.conv1(x)))))


class Plain(nn.Module):
    """As VGG: a pool behind the second of two chains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.first(x)))
        return self.pool(F.relu(self.bn2(self.second(x))))


DTYPES = [torch.float64, torch.float32]


def example(device: torch.device, dtype: torch.dtype, channels: int = 3) -> Tensor:
    x = torch.randn(4, channels, 32, 32, device=device, dtype=dtype)
    return x.to(memory_format=torch.channels_last)


def fused(net: nn.Module, **options: Any) -> nn.Module:
    made = copy.deepcopy(net)
    torchkiln.fuse(made, **options)
    return made


def outcome(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Results, gradients by ``backward()`` and buffers of a training step."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    y = net(x)
    y.square().sum().backward()
    assert x.grad is not None
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return [y, x.grad, *gradients, *(b.clone() for b in net.buffers())]


@pytest.fixture(autouse=True)
def reproducible() -> Any:
    """The same gradients in each call, in float32."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_of_a_net(device: torch.device, dtype: torch.dtype) -> None:
    net: Any = Net().to(device, dtype)
    net.to(memory_format=torch.channels_last)
    x = example(device, dtype)
    plain, light = outcome(fused(net), x), outcome(fused(net, recompute=True), x)
    if dtype is torch.float64:
        torch.testing.assert_close(plain, outcome(net, x))
    assert all(torch.equal(a, b) for a, b in zip(plain, light, strict=True))


def test_the_report() -> None:
    report = torchkiln.fuse(Net(), recompute=True)
    found = {row.name: row.now for row in report.replaced}
    again = "conv_bn_act(relu), again in backward"
    block = {"bn1": again, "bn2": again, "bn3": "conv_bn_act(relu, with the residual)"}
    expected = {"bn1": "conv_bn_act(relu, with the max pool)"}
    for i in range(3):
        expected |= {f"layer.{i}.{name}": now for name, now in block.items()}
    assert found == expected | {"layer.2.downsample.1": "conv_bn_act(none)"}
    report = torchkiln.fuse(Plain(), recompute=True)
    assert [row.now for row in report.replaced] == [again, "conv_bn_act(relu, with the max pool)"]


@pytest.mark.parametrize("make", [Net, Plain])
def test_second_derivatives(device: torch.device, make: Callable[[], nn.Module]) -> None:
    net = make().to(device, torch.float64)
    x = example(device, torch.float64, 3 if make is Net else 8)

    def both(net: nn.Module) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), *net.parameters()]
        y = net(leaves[0])
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        return [*first, *torch.autograd.grad(total, leaves)]

    torch.testing.assert_close(both(fused(net, recompute=True)), both(net), rtol=1e-6, atol=1e-6)


def test_results_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StorageWeakRef] = []
    compute = recompute.recomputed

    def watched(*args: Any) -> Input:
        found = compute(*args)
        made.append(StorageWeakRef(recompute.tensor_of(found).untyped_storage()))
        return found

    monkeypatch.setattr(recompute, "recomputed", watched)
    y = fused(Net(), recompute=True)(example(torch.device("cpu"), torch.float32))
    assert len(made) == 6
    assert all(storage.expired() for storage in made)
    y.sum().backward()


@pytest.mark.parametrize("name", ["conv2.weight", "bn1.weight"])
def test_a_changed_parameter_is_an_error(name: str) -> None:
    net = Bottleneck(16, 8)
    torchkiln.fuse(net, recompute=True)
    y = net(example(torch.device("cpu"), torch.float32, 16))
    with torch.no_grad():
        net.get_parameter(name).add_(1)
    for asked in (net.conv2.weight, net.conv1.weight):  # the first one needs no other node
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), asked, retain_graph=True)


def halve(_: nn.Module, inputs: tuple[Tensor]) -> None:
    inputs[0].detach().mul_(0.5)


def test_a_hook_that_changes_a_result() -> None:
    net = Bottleneck(16, 8).double()
    x = example(torch.device("cpu"), torch.float64, 16)
    found = []
    for options in ({}, {"recompute": True}):
        made = fused(net, **options)
        made.get_submodule("conv2").register_forward_pre_hook(halve)
        found.append(outcome(made, x))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_other_hooks_for_saved_tensors_see_all() -> None:
    net = Bottleneck(16, 8).double()
    x = example(torch.device("cpu"), torch.float64, 16)
    counts, found = [], []
    for options in ({}, {"recompute": True}):
        made = fused(net, **options)
        seen: list[int] = []

        def pack(tensor: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made(x)
        counts.append(seen)
        again = torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False)
        again.sum().backward()
        found.append([p.grad for p in made.parameters()])
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            made(x)
    assert counts[0] == counts[1]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_nothing_is_left_without_a_backward() -> None:
    net = fused(Bottleneck(16, 8), recompute=True)
    net.get_submodule("bn2").register_forward_hook(lambda *_: None)  # torch's functions run
    y = net(example(torch.device("cpu"), torch.float32, 16))
    storage = StorageWeakRef(y.untyped_storage())
    del y
    gc.collect()
    assert storage.expired()


def test_replicas_without_parameters() -> None:
    net = fused(Bottleneck(16, 8), recompute=True)
    x = example(torch.device("cpu"), torch.float32, 16)
    replica: Any = net._replicate_for_data_parallel()
    for name, module in net.named_children():
        copied = module._replicate_for_data_parallel()
        for key, value in module._parameters.items():
            setattr(copied, key, value)
        replica._modules[name] = copied
    torch.testing.assert_close(replica(x), copy.deepcopy(net)(x))


def test_copies_pickles_and_other_modes() -> None:
    net = Net()
    x = example(torch.device("cpu"), torch.float32)
    light = fused(net, recompute=True)
    expected = outcome(copy.deepcopy(light), x)
    for other in (copy.deepcopy(light), pickle.loads(pickle.dumps(light))):
        assert all(torch.equal(a, b) for a, b in zip(outcome(other, x), expected, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(light(x), net(x))
        torch.testing.assert_close(light.eval()(x), net.eval()(x))
    grad = torch.func.grad(lambda x: light(x).sum())(x)
    torch.testing.assert_close(grad, torch.func.grad(lambda x: net(x).sum())(x))


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_compiled_without_a_break(options: dict[str, bool]) -> None:
    net = fused(Net(), **options)
    x = example(torch.device("cpu"), torch.float32)
    expected = outcome(copy.deepcopy(net), x)
    compiled: Any = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = outcome(compiled, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_of_a_hook_between_blocks() -> None:
    x = example(torch.device("cpu"), torch.float64)
    found = []
    original = Net().double()
    for net in (original, fused(original)):
        seen: list[Tensor] = []

        def watch(_: nn.Module, __: Any, y: Tensor, seen: list[Tensor] = seen) -> None:
            y.register_hook(seen.append)

        net.get_submodule("layer.0").register_forward_hook(watch)
        net(x).sum().backward()
        found.append(seen)
    torch.testing.assert_close(found[0], found[1])


class Chain(nn.Module):
    """A batch norm, relu and a pool, called by a function."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], pool: nn.Module) -> None:
        super().__init__()
        self.norm, self.pool, self.call = nn.BatchNorm2d(8), pool, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def used_twice(m: Any, x: Tensor) -> Tensor:
    y = F.relu(m.norm(x))
    return m.pool(y).sum() + y


def with_a_residual(m: Any, x: Tensor) -> Tensor:
    return m.pool(F.relu(m.norm(x) + x))


def pooled(m: Any, x: Tensor) -> Tensor:
    return m.pool(F.relu(m.norm(x)))


def changed_before_the_pool(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    y = F.relu(m.norm(x))
    x = F.silu(x, inplace=True)
    return m.pool(y) + F.avg_pool2d(x, 2)


def changed_before_the_activation(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    y = m.norm(x)
    x = F.silu(x, inplace=True)
    return F.relu(y) + x


@pytest.mark.parametrize(
    ("call", "pool", "now"),
    [
        (pooled, nn.MaxPool2d(2), "bn_act(relu, with the max pool)"),
        (pooled, nn.AvgPool2d(2), "bn_act(relu)"),
        (used_twice, nn.MaxPool2d(2), "bn_act(relu)"),
        (with_a_residual, nn.MaxPool2d(2), "bn_act(relu, with the residual)"),
    ],
)
def test_pools(call: Callable[[Any, Tensor], Tensor], pool: nn.Module, now: str) -> None:
    net = Chain(call, pool).double()
    other = copy.deepcopy(net)
    assert torchkiln.fuse(other)["norm"].now == now
    x = example(torch.device("cpu"), torch.float64, 8)
    torch.testing.assert_close(outcome(other, x), outcome(net, x))


@pytest.mark.parametrize(
    ("call", "now"),
    [(changed_before_the_pool, "bn_act(relu)"), (changed_before_the_activation, "")],
)
@torch.no_grad()
def test_an_input_that_is_changed_in_between(
    call: Callable[[Any, Tensor], Tensor], now: str
) -> None:
    net = Chain(call, nn.MaxPool2d(2)).double()
    other = copy.deepcopy(net)
    assert torchkiln.fuse(other)["norm"].now == now
    x = example(torch.device("cpu"), torch.float64, 8)
    torch.testing.assert_close(other(x), net(x))


def test_a_pool_with_hooks_runs_them() -> None:
    net = Chain(pooled, nn.MaxPool2d(2))
    calls: list[int] = []
    net.pool.register_forward_hook(lambda *_: calls.append(1))
    assert torchkiln.fuse(net)["norm"].now == "bn_act(relu)"
    net(example(torch.device("cpu"), torch.float32, 8))
    assert calls == [1]


class InPlace(nn.Module):
    """One branch changes the input of both."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
        self.silu = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.silu(x)
        return F.relu(self.norm(self.conv(y)) + x)


class OutOfPlace(InPlace):
    """The same values."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(x)
        return F.relu(self.norm(self.conv(y)) + y)


def test_a_branch_that_changes_its_input() -> None:
    block, other, reference = Bottleneck(16, 8), InPlace(), OutOfPlace()
    reference.load_state_dict(other.state_dict())
    expected = nn.Sequential(copy.deepcopy(block), reference).double()
    x = example(torch.device("cpu"), torch.float64, 16)
    found = fused(nn.Sequential(block, other)).double()
    torch.testing.assert_close(outcome(found, x), outcome(expected, x))


class TwoHeads(nn.Module):
    """A body whose result two fused modules take."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Bottleneck(16, 8)
        self.one, self.other = Bottleneck(16, 8), Bottleneck(16, 8, projects=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.one(y) * 0.5 + self.other(y).sin()


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_two_heads(device: torch.device, options: dict[str, bool]) -> None:
    net = TwoHeads().to(device, torch.float64)
    x = example(device, torch.float64, 16)
    torch.testing.assert_close(outcome(fused(net, **options), x), outcome(net, x))


class Side(nn.Module):
    """Another use of the convolution's input before the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 2, 2), nn.BatchNorm2d(8)
        self.pool, self.side = nn.MaxPool2d(2), nn.AvgPool2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        z = self.side(x)
        return self.pool(y) + z


def test_a_pool_that_cannot_move_leaves_the_convolution() -> None:
    assert torchkiln.fuse(Side())["norm"].now == "conv_bn_act(relu)"
