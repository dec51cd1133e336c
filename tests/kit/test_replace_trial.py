"""``torchkiln.replace(model, example=batch)`` keeps the forwards that are faster on the batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.patch import trial
from torchkiln.patch.trial import MODEL_SLOWER, SLOWER, Trial

PAUSE = 0.005
"""Seconds of a pause: much longer than all other work of a call."""


class Clock:
    """A simulated clock: a pause adds its seconds, and each reading adds 1 ms."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-3
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the clock of trials."""
    monkeypatch.setattr(trial, "time", CLOCK)


class Waits(torch.autograd.Function):
    """Doubles x, and pauses in forward or in backward."""

    @staticmethod
    def forward(x: Tensor, at: str) -> Tensor:
        CLOCK.sleep(PAUSE * (at == "forward"))
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], _: Tensor) -> None:
        ctx.at = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        CLOCK.sleep(2 * PAUSE * (ctx.at == "backward"))
        return 2 * grad, None


def waits(x: Tensor, at: str) -> Tensor:
    y: Tensor = Waits.apply(x, at)  # type: ignore[no-untyped-call]
    return y


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return waits(x, "forward")


class Fast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Net(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), part
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.dropout(self.norm(self.part(self.first(x))), 0.5, self.training)
        return y


@pytest.fixture
def register() -> Iterator[Callable[[type[nn.Module], str], None]]:
    """Registers for a class a forward that pauses in forward or in backward."""
    classes = []

    def add(cls: type[nn.Module], at: str) -> None:
        classes.append(cls)
        torchkiln.replace.register(
            cls,
            lambda _, x: waits(x, at),
            inputs=lambda _: torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4),
        )

    yield add
    for cls in classes:
        torchkiln.replace.unregister(cls)


def test_seconds_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """seconds() returns the time of one call; on the real clock at least its sleep."""
    assert trial.seconds(CPU, lambda: CLOCK.sleep(PAUSE), 4) == pytest.approx(PAUSE, rel=0.1)
    monkeypatch.setattr(trial, "time", time)
    assert trial.seconds(CPU, lambda: time.sleep(PAUSE), 2) >= PAUSE


def test_a_slower_forward_is_left_out(register: Callable[[type[nn.Module], str], None]) -> None:
    register(Fast, "forward")
    net = Net(Fast())
    row = torchkiln.replace(net, example=torch.ones(3, 4))["part"]
    assert (row.outcome, row.reason) == ("kept", SLOWER)
    assert type(net.part) is Fast
    assert row.seconds_now is not None
    assert row.seconds_was is not None
    assert row.seconds_now > PAUSE > row.seconds_was


def test_a_faster_forward_is_kept(register: Callable[[type[nn.Module], str], None]) -> None:
    register(Slow, "nowhere")
    net = Net(Slow())
    report = torchkiln.replace(net, example=torch.ones(3, 4), only="registered")
    assert report["part"].outcome == "replaced"
    assert type(net.part) is not Slow
    assert report.seconds_now is not None
    assert report.seconds_was is not None
    assert report.seconds_was > PAUSE > report.seconds_now
    assert "; model: " in str(report)


@pytest.mark.parametrize(("training", "kept"), [(True, True), (False, False)])
def test_backward_counts_in_training(
    training: bool, kept: bool, register: Callable[[type[nn.Module], str], None]
) -> None:
    """In training the new forward is not kept: it saves one PAUSE, its backward costs two."""
    register(Slow, "backward")
    net = Net(Slow()).train(training)
    row = torchkiln.replace(net, example=torch.ones(3, 4), only="registered")["part"]
    assert (row.outcome == "kept") is kept


def test_no_module_changes_if_the_model_is_slower(
    register: Callable[[type[nn.Module], str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(Slow, "nowhere")
    monkeypatch.setattr(trial, "seconds_of_model", lambda *_: [1.0, 2.0])
    net = Net(Slow())
    report = torchkiln.replace(net, example=torch.ones(3, 4))
    assert not report.changed
    assert report["part"].reason == MODEL_SLOWER
    assert type(net.part) is Slow


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_trial_leaves_no_trace(
    dry_run: bool, register: Callable[[type[nn.Module], str], None]
) -> None:
    register(Slow, "nowhere")
    net = Net(Slow())
    state = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.ones(3, 4, requires_grad=True)
    random = torch.get_rng_state()
    report = torchkiln.replace(net, example=x, dry_run=dry_run)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert x.grad is None
    assert all(parameter.grad is None for parameter in net.parameters())
    assert report["part"].changed
    assert (type(net.part) is Slow) is dry_run
    if not dry_run:
        report.undo()
    assert type(net.part) is Slow


def test_a_module_that_the_model_does_not_call(
    register: Callable[[type[nn.Module], str], None],
) -> None:
    register(Slow, "nowhere")
    net = Net(Fast())
    net.other = Slow()
    row = torchkiln.replace(net, example=torch.ones(3, 4), only="registered")["other"]
    assert row.seconds_now is None
    assert row.changed


def test_fused_batch_norms_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norms of a module are tried together, and all their rows have the same times."""
    monkeypatch.setattr(Trial, "times", lambda *_: [1.0, 2.0])
    net = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.ReLU(), nn.BatchNorm1d(2))
    report = torchkiln.replace(net, example=torch.ones(3, 2, 5), only="batch_norm")
    assert report["1"].reason == SLOWER
    assert report["1"].seconds_now == 2.0
    assert not report.changed
    assert type(net) is nn.Sequential


class Dropping(nn.Module):
    """A gated unit with a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(self.gate(x)) * self.up(x)
        y: Tensor = self.dropout(self.down(hidden))
        return y


def test_errors_are_those_of_evaluation() -> None:
    """The reported error is measured in eval mode, where no dropout differs."""
    net = Dropping()
    row = torchkiln.replace(nn.Sequential(net), example=torch.randn(4, 8))["0"]
    assert net.training
    assert net.dropout.training
    assert row.kind == "glu"
    assert row.error_now is not None
    assert row.error_now < 1e-6
