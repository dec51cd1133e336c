"""``torchkiln.replace(head=True)``: the head and the loss of its logits become one op."""

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
from torchkiln.patch.source import logits as waiting

TOKENS, FEATURES = 50, 16


class Model(nn.Module):
    """A language model whose logits may be divided by a scale and capped."""

    def __init__(self, scale: float = 1.0, cap: float | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, FEATURES)
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, TOKENS, bias=bias)
        self.scale, self.cap = scale, cap

    def forward(self, x: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        logits = self.head(self.layer(self.tokens(x)))
        logits = logits / self.scale
        if self.cap is not None:
            logits = logits / self.cap
            logits = torch.tanh(logits)
            logits = logits * self.cap
        loss = None
        if labels is not None:
            shifted = logits[..., :-1, :].contiguous()
            if shifted.dtype == torch.bfloat16:
                shifted = shifted.float()
            rows = shifted.view(-1, shifted.shape[-1])
            loss = F.cross_entropy(rows, labels[..., 1:].reshape(-1), **options)
        return logits, loss


class Projection(nn.Module):
    """A linear layer, then the head."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(FEATURES, FEATURES)
        self.decoder = nn.Linear(FEATURES, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.dense(x))
        x = self.decoder(x)
        return x  # noqa: RET504  as in transformers


class Nested(nn.Module):
    """The head is in a submodule, and the loss is always computed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, FEATURES)
        self.project = Projection()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.project(self.tokens(x))
        criterion = nn.CrossEntropyLoss()
        return {"loss": criterion(scores.transpose(1, 2), labels), "logits": scores}


class Flat(Nested):
    """The loss reads a flat view of the logits."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.project(self.tokens(x))
        criterion = nn.CrossEntropyLoss()
        loss = criterion(scores.view(-1, TOKENS), labels.view(-1))
        return {"loss": loss, "logits": scores}


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each loss that was computed without logits."""
    found: list[dict[str, Any]] = []

    def kept(*args: Any, **options: Any) -> Tensor:
        found.append(options)
        return torchkiln.linear_cross_entropy(*args, **options)

    monkeypatch.setattr(waiting, "linear_cross_entropy", kept)
    return found


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randint(0, TOKENS, (16, 64))
    labels = x.clone()
    labels[0, 3] = -100
    return x, labels


def made(cls: Callable[..., nn.Module] = Model, *args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(*args, **options)


def outcome(model: Any, *args: Any, reads: bool = True, **options: Any) -> list[Tensor]:
    """The loss and its gradients; with ``reads``, also those of the sum of squared logits."""
    found = model(*args, **options)
    logits, loss = found if isinstance(found, tuple) else (found["logits"], found["loss"])
    total = loss.sum() + (logits.square().sum() / 100 if reads else 0)
    return [loss, *torch.autograd.grad(total, list(model.parameters()))]


def error(found: list[Tensor], truth: list[Tensor]) -> float:
    """The mean over tensors of the error relative to the norm."""
    pairs = zip(found, truth, strict=True)
    errors = [float(((a.double() - b).norm() / b.norm()).detach()) for a, b in pairs]
    return sum(errors) / len(errors)


FORMS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"scale": 3},
    {"scale": 0.25},
    {"cap": 2.0},
    {"cap": 0.7, "scale": 2.0},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_losses_and_gradients(
    form: dict[str, Any], dtype: torch.dtype, losses: list[dict[str, Any]]
) -> None:
    """Losses and gradients agree with float64; logits can still be read."""
    model, (x, labels) = made(Model, **form).to(dtype), batch()
    reads = dtype != torch.bfloat16
    truth = outcome(copy.deepcopy(model).double(), x, labels, reads=reads)
    expected = outcome(model, x, labels, reads=reads)
    logits = model(x, labels)[0]
    report = torchkiln.replace(model, head=True)
    row = report[""]
    assert (row.kind, row.changed) == ("head", True)
    assert row.now.startswith("linear_cross_entropy at head")
    found = outcome(model, x, labels, reads=reads)
    assert len(losses) == 1
    assert [y.dtype for y in found] == [y.dtype for y in expected]
    # If the number of labels is no power of two, a bfloat16 gradient of a mean is rounded again.
    least = {torch.float64: 1e-14, torch.float32: 1e-7, torch.bfloat16: 1e-5}[dtype]
    assert error(found[:1], truth[:1]) <= error(expected[:1], truth[:1]) * 1.05 + least
    assert error(found, truth) <= error(expected, truth) * 1.25 + least
    assert torch.equal(model(x, labels)[0], logits)
    report.undo()
    assert type(model) is Model
    assert all(map(torch.equal, outcome(model, x, labels, reads=reads), expected))


@pytest.mark.parametrize(
    "options",
    [
        {"ignore_index": 3},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"weight": torch.linspace(0.5, 2, TOKENS)},
        {"label_smoothing": 0.1, "weight": torch.linspace(0.5, 2, TOKENS)},
    ],
    ids="-".join,
)
def test_options_of_the_loss(options: dict[str, Any], losses: list[dict[str, Any]]) -> None:
    model, (x, labels) = made(), batch()
    labels = labels.clamp_min(0)
    expected = outcome(model, x, labels, **options)
    torchkiln.replace(model, head=True)
    for one, other in zip(outcome(model, x, labels, **options), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert len(losses) == 1


def test_calls_that_need_the_logits(losses: list[dict[str, Any]]) -> None:
    """A loss with probabilities as labels is torch's, from the logits."""
    x, _ = batch()
    shares = torch.rand(16, 63, TOKENS)

    class Shares(Model):
        def forward(self, x: Tensor, labels: Any = None, **_: Any) -> Any:
            logits = self.head(self.tokens(x[..., 1:]))
            return logits, F.cross_entropy(logits.view(-1, TOKENS), labels.view(-1, TOKENS))

    model = made(Shares)
    expected = model(x, shares)
    assert torchkiln.replace(model, head=True)[""].changed
    assert all(map(torch.equal, model(x, shares), expected))
    assert not losses


def test_a_call_without_labels_is_unchanged() -> None:
    model, (x, _) = made(), batch()
    expected = model(x)[0]
    torchkiln.replace(model, head=True)
    logits, loss = model(x)
    assert loss is None
    assert torch.equal(logits, expected)
    assert type(logits) is Tensor


def test_logits_are_none_in_training_where_only_the_loss_is_wanted() -> None:
    model, (x, labels) = made(), batch()
    expected = model(x, labels)
    report = torchkiln.replace(model, head="loss")
    assert report[""].now == "linear_cross_entropy at head, without logits, cross_entropy"
    logits, loss = model(x, labels)
    assert logits is None
    torch.testing.assert_close(loss, expected[1])
    assert torch.equal(model(x)[0], expected[0])
    model.eval()
    assert torch.equal(model(x, labels)[0], expected[0])


@pytest.mark.parametrize("cls", [Nested, Flat])
def test_a_head_in_a_submodule(cls: type[nn.Module], losses: list[dict[str, Any]]) -> None:
    model, (x, labels) = made(cls), batch()
    expected = outcome(model, x, labels)
    direct = model.project(model.tokens(x))
    report = torchkiln.replace(model, head=True)
    if cls is Nested:
        reason = report["linear_cross_entropy"].reason
        assert reason == "its forward has another use of logits: scores.transpose"
        return
    assert report["project"].now == "logits of decoder for linear_cross_entropy"
    for one, other in zip(outcome(model, x, labels), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert len(losses) == 1
    assert torch.equal(model.project(model.tokens(x)), direct)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(outcome(other, x, labels), expected)
    assert len(losses) == 3
    report.undo()
    assert (type(model), type(model.project)) == (cls, Projection)


def test_a_wide_head_that_was_replaced_before(losses: list[dict[str, Any]]) -> None:
    model, (x, labels) = made(), batch()
    model.tokens = nn.Embedding(513, FEATURES)
    model.layer, model.head = nn.Linear(FEATURES, 512), nn.Linear(512, 513)
    expected = outcome(model, x, labels)
    assert torchkiln.replace(model, only="linear")["head"].changed
    assert torchkiln.replace(model, head=True)[""].kind == "head"
    for one, other in zip(outcome(model, x, labels), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert len(losses) == 1


def test_second_derivatives() -> None:
    model, (x, labels) = made(), batch()

    def second() -> tuple[Tensor, ...]:
        parameters = [*model.head.parameters(), *model.layer.parameters()]
        grads = torch.autograd.grad(model(x, labels)[1], parameters, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), parameters)

    expected = second()
    torchkiln.replace(model, head=True)
    for one, other in zip(second(), expected, strict=True):
        torch.testing.assert_close(one, other)


def add_hook(model: Any) -> None:
    model.head.register_forward_hook(lambda _, __, y: y * 2)


def set_forward(model: Any) -> None:
    before = model.head.forward
    model.head.forward = lambda x: before(x) * 2


class Adapted(nn.Module):
    """A layer around a head, as LoRA adds."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y + x.sum(-1, keepdim=True)


def adapt(model: Any) -> None:
    model.head = Adapted(model.head)


def parametrize(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.head)


@pytest.mark.parametrize("change", [add_hook, set_forward, adapt, parametrize])
def test_a_changed_head_is_called(
    change: Callable[[Any], None], losses: list[dict[str, Any]]
) -> None:
    model, (x, labels) = made(), batch()
    torchkiln.replace(model, head=True)
    other = made()
    change(model)
    change(other)
    for one, same in zip(outcome(model, x, labels), outcome(other, x, labels), strict=True):
        torch.testing.assert_close(one, same)
    assert not losses


class Modes(Model):
    """Losses without a gradient or outside of autocast, of all rows and of some of them."""

    def forward(self, x: Tensor, labels: Any = None, **_: Any) -> Any:
        logits = self.head(self.layer(self.tokens(x)))
        mask = labels != -100
        with torch.no_grad():
            some = logits[mask]
        with torch.autocast("cpu", enabled=False):
            losses = [F.cross_entropy(logits.float().view(-1, TOKENS), labels.view(-1))]
            losses += [F.cross_entropy(logits.float()[mask], labels[mask])]
            losses += [F.cross_entropy(some.float(), labels[mask])]
        return logits, torch.stack(losses)


def test_modes_that_change_in_the_forward(losses: list[dict[str, Any]]) -> None:
    model, (x, labels) = made(Modes), batch()
    truth = outcome(copy.deepcopy(model).double(), x, labels)
    with torch.autocast("cpu", torch.bfloat16):
        expected = outcome(model, x, labels)
        torchkiln.replace(model, head=True)
        found = outcome(model, x, labels)
    assert len(losses) == 1
    assert [y.dtype for y in found] == [y.dtype for y in expected]
    assert error(found, truth) <= error(expected, truth) * 1.25


def test_a_module_with_another_replacement_in_the_place_of_a_head() -> None:
    class Inner(Projection):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.dense(x))
            x = self.decoder(x)
            return x  # noqa: RET504  as in transformers

    model, other, (x, labels) = made(Flat), made(Flat), batch()
    for one in (model, other):
        one.project = Inner()
    assert torchkiln.replace(model, head=True)["project"].kind == "head"
    assert torchkiln.replace(other, only="mlp")["project"].changed
    expected = other(x, labels)["logits"]
    model.tokens, model.project = other.tokens, other.project
    assert torch.equal(model(x, labels)["logits"], expected)


def test_an_input_that_changes_after_the_head() -> None:
    class Changes(Model):
        def forward(self, x: Tensor, labels: Any = None, **_: Any) -> Any:
            h = self.layer(self.tokens(x))
            logits = self.head(h)
            h.zero_()
            return logits, F.cross_entropy(logits.view(-1, TOKENS), labels.view(-1))

    model = made(Changes)
    torchkiln.replace(model, head=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="an input that has changed"):
        model(*batch())


def test_reasons() -> None:
    model = made()
    assert torchkiln.replace(model, head=True, skip=["head"])["head"].reason == "skip"
    assert type(model).forward is not Model.forward  # only the loss is replaced
    report = torchkiln.replace(nn.Linear(4, 4), head=True)
    assert report["linear_cross_entropy"].reason.startswith("no forward makes a loss of tokens")
    with pytest.raises(ValueError, match=r"torchkiln\.replace: head: got 'logits', expected False"):
        torchkiln.replace(model, head="logits")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"head: got True with exact=True, expected False"):
        torchkiln.replace(model, head=True, exact=True)


class Divisor(Model):
    def forward(self, x: Tensor, labels: Any = None, **_: Any) -> Any:
        logits = self.head(self.tokens(x))
        return 1.0 / logits, F.cross_entropy(logits.view(-1, TOKENS), labels.view(-1))


class Keyword(Model):
    def forward(self, x: Tensor, labels: Any = None, **_: Any) -> Any:
        logits = self.head(self.tokens(x))
        return logits, F.cross_entropy(logits.reshape(shape=(-1, TOKENS)), labels.view(-1))


@pytest.mark.parametrize("cls", [Divisor, Keyword])
def test_other_uses_of_logits(cls: type[nn.Module]) -> None:
    model, given = made(cls), batch()
    expected = model(*given)
    reason = torchkiln.replace(model, head=True)["linear_cross_entropy"].reason
    assert reason.startswith("its forward has another use of logits: ")
    assert torch.equal(model(*given)[0], expected[0])


def test_transforms_and_exports_get_tensors() -> None:
    model, (x, labels) = made(), batch()
    expected = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x, labels))[1])(
        dict(model.named_parameters())
    )
    exported = torch.export.export(model, (x, labels)).module()(x, labels)
    torchkiln.replace(model, head=True)
    found = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x, labels))[1])(
        dict(model.named_parameters())
    )
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name])
    for one, other in zip(
        torch.export.export(model, (x, labels)).module()(x, labels), exported, strict=True
    ):
        torch.testing.assert_close(one, other)
