"""``torchkiln.replace``: losses of torch that a forward calls."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

import torchkiln
from torchkiln.patch.source import loss_calls
from torchkiln.patch.source.calls import HELPERS


def as_tuple(forward: Any) -> Any:
    """A decorator that returns a tuple on request, as on Hugging Face's models."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **options: Any) -> Any:
        wants_tuple = options.pop("wants_tuple", False)
        found = forward(self, *args, **options)
        return (found,) if wants_tuple else found

    return wrapper


class Head(nn.Module):
    """A model whose forward creates the module of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 11)

    @as_tuple
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.layer(x)
        if labels is None:
            return logits
        loss_fct = CrossEntropyLoss(ignore_index=3)
        loss: Tensor = loss_fct(logits.view(-1, 11), labels.view(-1))
        return loss


class Functional(Head):
    """A model whose forward calls torch's function."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.layer(x)
        return F.cross_entropy(logits.view(-1, 11), labels.view(-1), ignore_index=3)


def squares(one: Tensor, other: Tensor) -> Tensor:
    return one.square().sum() + other.sum()


class Others(Head):
    """Losses with options that the op lacks, and other functions named cross_entropy."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        def called(cross_entropy: Any) -> Tensor:
            found: Tensor = cross_entropy(logits, labels)
            return found

        logits = self.layer(x)
        with_old_option = nn.CrossEntropyLoss(size_average=False)
        total: Tensor = with_old_option(logits, labels) + called(squares)
        return total + sum(cross_entropy(logits, labels) for cross_entropy in [squares])


class Positions(Head):
    """The ignored label is the number of classes."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.layer(x)
        size = logits.size(1)
        loss: Tensor = CrossEntropyLoss(ignore_index=size)(logits, labels)
        return loss


class AnyTensors(Head):
    """A forward that passes any arguments to the loss."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return cross_entropy(*args, **options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of each loss that the op computed."""
    found: list[str] = []

    def counted(called: Any) -> Any:
        loss = loss_calls.loss_of(called)

        def call(*args: Any, **options: Any) -> Any:
            result = loss(*args, **options)
            found.append(type(result).__module__ if isinstance(result, nn.Module) else "called")
            return result

        return called if loss is called else call

    monkeypatch.setitem(HELPERS, loss_calls.LOSS, counted)
    torchkiln.patch.plan.MADE.clear()
    return found


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 16, dtype=dtype), torch.tensor([0, 3, 10, 4, 3])


@pytest.mark.parametrize("make", [Head, Functional])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_losses_and_gradients(make: type[nn.Module], dtype: torch.dtype, calls: list[str]) -> None:
    model = make().to(dtype)
    x, labels = batch(dtype)

    def outcome() -> list[Tensor]:
        loss = model(x, labels)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = outcome()
    report = torchkiln.replace(model)
    assert (report[""].kind, report[""].now, report[""].changed) == ("loss", "cross_entropy", True)
    found = outcome()
    assert calls == ["torchkiln.patch.source.loss_calls" if make is Head else "called"]
    error = 1e-9 if dtype == torch.float64 else 0.02
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=error, atol=error)
    report.undo()
    assert type(model) is make
    assert torch.equal(model(x, labels), expected[0])


def test_a_model_keeps_its_name_its_arguments_and_its_decorators(calls: list[str]) -> None:
    model = Head()
    x, labels = batch(torch.float32)
    logits, loss = model(x), model(x, labels)
    torchkiln.replace(model)
    assert type(model).__name__ == "Head"
    assert inspect.signature(model.forward) == inspect.signature(Head().forward)
    assert torch.equal(model(x), logits)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        (found,) = other(x, labels=labels, wants_tuple=True)
        torch.testing.assert_close(found, loss)
    assert len(calls) == 3


def test_the_op_is_in_the_graph(traced: Callable[..., set[str]]) -> None:
    for make in (Head, Functional):
        model = make()
        torchkiln.replace(model)
        assert any(
            "cross_entropy" in name and "kiln" in name
            for name in traced(model, *batch(torch.float32))
        )


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_other_options_and_names_run_as_they_were(calls: list[str]) -> None:
    model = Others()
    x, labels = batch(torch.float32)
    expected = model(x, labels)
    assert torchkiln.replace(model)[""].now == "cross_entropy"
    assert torch.equal(model(x, labels), expected)
    assert calls == ["torch.nn.modules.loss"]


def test_an_index_that_is_a_size_stays() -> None:
    report = torchkiln.replace(Positions())
    assert "" not in [row.name for row in report.changed]


def test_tensors_that_only_torch_takes(calls: list[str]) -> None:
    model = AnyTensors()
    x, labels = batch(torch.float32)
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, labels.to(torch.uint8)), {}),
        ((x[0], labels[0]), {}),
        ((x, x.softmax(1)), {"weight": torch.rand(16, requires_grad=True)}),
        ((x, labels, torch.rand(16)), {"reduction": "sum", "label_smoothing": 0.1}),
    ]
    expected = [model(*args, **options) for args, options in given]
    torchkiln.replace(model)
    for (args, options), loss in zip(given, expected, strict=True):
        torch.testing.assert_close(model(*args, **options), loss)
    assert calls == ["called"] * len(given)


def test_losses_stay_with_exact_and_without_their_kind() -> None:
    for options in ({"exact": True}, {"only": ["norm"]}):
        assert "" not in [row.name for row in torchkiln.replace(Head(), **options).changed]


def test_a_loss_function_that_the_forward_does_not_call() -> None:
    model: Any = Head()
    model.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
        logits.view(-1, vocab_size), labels.view(-1)
    )
    row = torchkiln.replace(model)["loss_function"]
    assert (row.changed, row.reason) == (False, "its forward calls another loss")
