"""torchkiln.fuse and batch norms whose own forward calls an activation, as in timm."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln


class NormAct(nn.BatchNorm2d):
    """A batch norm with a dropout and an activation, which spells out torch's forward."""

    def __init__(self, channels: int, act: nn.Module | None = None) -> None:
        super().__init__(channels)
        self.drop: nn.Module = nn.Identity()
        self.act = nn.Identity() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(self.normalized(x)))

    def normalized(self, x: Tensor) -> Tensor:
        average = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                average = 1.0 / float(self.num_batches_tracked)
        return F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            average,
            self.eps,
        )


class Inherited(NormAct):
    """The same calls by ``super()``."""

    def normalized(self, x: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, x)


class Doubled(NormAct):
    """Multiplies the result by 2."""

    def normalized(self, x: Tensor) -> Tensor:
        return 2 * super().normalized(x)


class OtherEps(NormAct):
    """Adds another number to the variance."""

    def normalized(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, 1e-3
        )


class NoStatistics(NormAct):
    """Keeps no statistics in training."""

    def normalized(self, x: Tensor) -> Tensor:
        mean, var = (None, None) if self.training else (self.running_mean, self.running_var)
        return F.batch_norm(x, mean, var, self.weight, self.bias, self.training, 0.1, self.eps)


class Swapped(NormAct):
    """The activation precedes the batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        return self.normalized(self.act(x))


class Counting(NormAct):
    """Counts its calls."""

    calls = 0

    def normalized(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().normalized(x)


class Large(NormAct):
    """Another formula for large batches."""

    def normalized(self, x: Tensor) -> Tensor:
        y = super().normalized(x)
        return y + 1 if x.shape[0] > 100 else y


class Detached(NormAct):
    """The gradient ends at the norm."""

    def normalized(self, x: Tensor) -> Tensor:
        return super().normalized(x).detach()


class Block(nn.Module):
    """An inverted residual block of a MobileNet."""

    bn1: Any
    bn2: Any

    def __init__(self, norm: Callable[..., nn.Module] = NormAct) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(6, 8, 1, bias=False), norm(8, nn.SiLU(inplace=True))
        self.conv2, self.bn2 = nn.Conv2d(8, 6, 3, padding=1), norm(6)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x))
        return self.act(self.bn2(self.conv2(y)) + x)


def example() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, 5, 5, generator=generator, dtype=torch.float64)


def results(block: Any, x: Tensor) -> list[Tensor]:
    """Output, gradients and statistics of two training steps, and the output of evaluation."""
    found = []
    block.train()
    for _ in range(2):
        given = x.clone().requires_grad_()
        y = block(given)
        found += [y, *torch.autograd.grad(y.square().sum(), [given, *block.parameters()])]
    block.eval()
    with torch.no_grad():
        found.append(block(x))
    return [*found, *block.state_dict().values()]


@pytest.mark.parametrize("norm", [NormAct, Inherited])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_results_are_those_of_the_calls(norm: type[NormAct], momentum: float | None) -> None:
    block = Block(norm).double()
    block.bn1.momentum = block.bn2.momentum = momentum
    expected = results(copy.deepcopy(block), example())
    report = torchkiln.fuse(block)
    assert report["bn1"].now == "conv_bn_act(silu)"
    assert report["bn2"].now == "conv_bn_act(relu, with the residual)"
    for one, other in zip(results(block, example()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_one_call_runs_no_forward_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block().double()
    torchkiln.fuse(block)
    monkeypatch.setattr(NormAct, "forward", lambda *_: pytest.fail("called"))
    results(block, example())


@pytest.mark.parametrize(
    "norm",
    [Doubled, OtherEps, NoStatistics, Swapped, Counting, Large, Detached],
    ids=lambda c: c.__name__,
)
def test_other_forwards_are_left_alone(norm: type[NormAct]) -> None:
    report = torchkiln.fuse(Block(norm).double())
    assert not report.changed
    assert "not proven" in report["bn1"].reason
    calls = getattr(report.model.bn1, "calls", 0)
    assert calls == 0


def test_a_dropout_is_left_alone() -> None:
    block = Block()
    block.bn1.drop = nn.Dropout()
    assert torchkiln.fuse(block)["bn1"].reason == "it calls drop, which is no activation"


@pytest.mark.parametrize("change", ["activation", "eps", "hook", "module"])
def test_a_later_change_runs_the_calls(change: str) -> None:
    block = Block().double().eval()
    torchkiln.fuse(block)
    if change == "activation":
        block.bn1.act = nn.Tanh()
    elif change == "eps":
        block.bn1.eps = 0.25
    elif change == "hook":
        block.bn1.act.register_forward_hook(lambda *_: torch.zeros(4, 8, 5, 5).double())
    else:
        block.bn1.drop = nn.Dropout().eval()
    plain = Block().double().eval()
    plain.load_state_dict(block.state_dict())
    vars(plain)["_modules"].update(block._modules)
    torch.testing.assert_close(block(example()), Block.forward(plain, example()))


def test_the_fold_is_kept_and_renewed() -> None:
    block = Block().double().eval()
    torchkiln.fuse(block)
    with torch.no_grad():
        before = block(example())
        assert torch.equal(block(example()), before)
        block.bn1.weight.mul_(2)
        block.bn1.running_var.add_(1)
        expected = torchkiln.fuse(copy.deepcopy(block)).model(example())
        assert not torch.equal(block(example()), before)
        torch.testing.assert_close(block(example()), expected)


def test_copies_pickles_and_undo() -> None:
    block = Block().double().eval()
    report = torchkiln.fuse(block)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(other(example()), block(example()))
        with torch.no_grad():
            other.bn1.weight.zero_()  # a copy has parameters of its own
            assert not torch.equal(other(example()), block(example()))
    report.undo()
    assert type(block) is Block
    assert list(block.state_dict()) == list(Block().state_dict())


def test_under_the_compiler_the_calls_run() -> None:
    block = Block().double()
    expected = results(copy.deepcopy(block), example())
    torchkiln.fuse(block)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    for one, other in zip(results(compiled, example()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
