"""``torchkiln.replace(head=True)``: tensors that are changed between the head and the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln
from torchkiln.patch.source.logits import Logits

TOKENS, FEATURES = 50, 16


class Model(nn.Module):
    """A model that adds a bias to the result of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, FEATURES)
        self.head = nn.Linear(FEATURES, TOKENS, bias=False)
        self.bias = nn.Parameter(torch.linspace(-1, 1, TOKENS))

    def forward(self, x: Tensor, labels: Any = None, *, changes: bool = False) -> Any:
        logits = self.head(self.tokens(x)) + self.bias
        if changes:
            with torch.no_grad():
                self.bias.add_(1)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, TOKENS), labels.view(-1))
        return logits, loss


class Bits(Model):
    """The logits are viewed as another dtype."""

    def forward(self, x: Tensor, labels: Any = None) -> Any:  # type: ignore[override]
        logits = self.head(self.tokens(x))
        return logits.view(torch.int32), F.cross_entropy(logits.view(-1, TOKENS), labels.view(-1))


def made(cls: type[Model]) -> tuple[Any, tuple[Tensor, Tensor]]:
    """A replaced model and its arguments."""
    torch.manual_seed(0)
    model, x = cls(), torch.randint(0, TOKENS, (4, 8))
    expected = model(x, x)
    assert torchkiln.replace(model, head=True)[""].now.startswith("linear_cross_entropy at head")
    torch.testing.assert_close(model(x, x), expected)
    return model, (x, x)


def test_a_bias_that_changes_after_it_was_added() -> None:
    model, (x, labels) = made(Model)
    expected = model(x)[0]
    with torch.no_grad():
        # Without labels the head runs at once.
        torch.testing.assert_close(model(x, changes=True)[0], expected)
        with pytest.raises(RuntimeError, match="an input that has changed"):
            model(x, labels, changes=True)


def test_a_bias_that_changes_after_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are read after a change of the bias would be wrong, so an error is raised."""
    model, given = made(Model)
    read = Logits.tensor

    def changed(self: Logits) -> Tensor:
        with torch.no_grad():
            model.bias.add_(1)
        return read(self)

    monkeypatch.setattr(Logits, "tensor", changed)
    with pytest.raises(RuntimeError, match="an input that has changed"):
        model(*given)


def test_views_of_another_dtype() -> None:
    model, given = made(Bits)
    logits = model.tokens(given[0]) @ model.head.weight.T
    torch.testing.assert_close(model(*given)[0].view(torch.float32), logits)
