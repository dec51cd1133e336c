"""torchkiln.fuse: max pools, and sums of the gradients of two branches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_nets import Bottleneck, Net, example, fused, outcome
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln


class Chain(nn.Module):
    """A batch norm and a pool, which the function ``call`` runs."""

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
    """One branch changes in place the tensor that the other one reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
        self.silu = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.silu(x)
        return F.relu(self.norm(self.conv(y)) + x)


class OutOfPlace(InPlace):
    """``InPlace`` with a SiLU that does not overwrite its input: the values must be the same."""

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
    """A body whose result is the input of two fused modules."""

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
    """A module that runs before the pool may change the convolution's input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 2, 2), nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.side = nn.Sequential(nn.AvgPool2d(4), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        z = self.side(x)
        return self.pool(y) + z


def test_a_pool_that_cannot_move_leaves_the_convolution() -> None:
    assert torchkiln.fuse(Side())["norm"].now == "conv_bn_act(relu)"


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


class Noisy(nn.Module):
    """A forward that makes a tensor of the sizes of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        sizes = [x.shape[0]] + [1] * (x.ndim - 1)
        noise = torch.ones(sizes, dtype=x.dtype, device=x.device)
        y: Tensor = self.relu(self.norm(x)) * noise
        return y


def test_sizes_are_no_tensors() -> None:
    """torch reads the memory of a tensor among sizes, which a traced value does not have."""
    model = Noisy().double()
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    right = copy.deepcopy(model)(x)
    assert torchkiln.fuse(model)["norm"].changed
    torch.testing.assert_close(model(x), right)
