"""The recipes of docs/examples/post_training.py agree with the formulas of their papers.

Losses and gradients are computed in float64, from the probabilities of all classes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
SEQUENCES, TOKENS, WIDTH, CLASSES = 4, 9, 7, 23
MOST_LINES = 15


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example with the recipes, imported as a module."""
    monkeypatch.syspath_prepend(FOLDER)
    yield import_module("post_training")
    del sys.modules["post_training"]


class Batch:
    """Hidden states and a head that require gradients, tokens, and a mask of completions."""

    def __init__(self, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        normal: dict[str, Any] = {"generator": draw, "dtype": torch.float64}
        self.hidden = torch.randn(SEQUENCES, TOKENS, WIDTH, **normal).requires_grad_()
        self.head = torch.randn(CLASSES, WIDTH, **normal).requires_grad_()
        self.tokens = torch.randint(CLASSES, (SEQUENCES, TOKENS), generator=draw)
        starts = torch.tensor([2, 5, 3, 7]).unsqueeze(1)
        self.mask = torch.arange(TOKENS) >= starts
        self.old, self.ref = torch.randn(2, SEQUENCES, TOKENS - 1, **normal) * 0.3
        self.gain = torch.randn(SEQUENCES, **normal)
        self.pairs = torch.randn(4, 2, **normal) * 5 - 20
        self.teacher = torch.randn(SEQUENCES, TOKENS, WIDTH + 2, **normal)
        self.teacher_head = torch.randn(CLASSES, WIDTH + 2, **normal)

    def counted(self) -> list[list[int]]:
        """The positions of each sequence whose next token belongs to the completion."""
        return [[t for t in range(TOKENS - 1) if self.mask[s, t + 1]] for s in range(SEQUENCES)]

    def p(self, s: int, t: int) -> Tensor:
        """The probabilities of all classes for the token after position t."""
        logits = self.head @ self.hidden[s, t]
        return logits.exp() / logits.exp().sum()

    def logp(self, s: int, t: int) -> Tensor:
        """The log-probability of the actual token after position t."""
        return self.p(s, t)[self.tokens[s, t + 1]].log()

    def sums(self) -> list[Tensor]:
        """The log-probability of each completion."""
        return [torch.stack([self.logp(s, t) for t in at]).sum() for s, at in self.counts()]

    def means(self) -> list[Tensor]:
        """The mean log-probability of the tokens of each completion."""
        return [y / len(at) for y, (_, at) in zip(self.sums(), self.counts(), strict=True)]

    def counts(self) -> list[tuple[int, list[int]]]:
        """Pairs of a sequence's index and its positions from :meth:`counted`."""
        return list(enumerate(self.counted()))


def log_sigmoid(x: Tensor) -> Tensor:
    """-log(1 + exp(-x))."""
    return -(1 + (-x).exp()).log()


def plain_sft(b: Batch) -> Tensor:
    """Minus the mean log-probability of all tokens of completions."""
    return -sum(b.sums()) / sum(map(len, b.counted()))  # type: ignore[return-value]


def plain_dpo(b: Batch) -> Tensor:
    """DPO of two pairs: sequences 0 and 1 are chosen, 2 and 3 rejected."""
    y, ref = b.sums(), b.pairs
    margins = [y[i] - ref[0, i] - (y[i + 2] - ref[1, i]) for i in range(2)]
    return -sum(log_sigmoid(0.1 * m) for m in margins) / 2  # type: ignore[return-value]


def plain_orpo(b: Batch) -> Tensor:
    """ORPO of two pairs: log-likelihood of the chosen one, log-sigmoid of the log odds ratio."""
    y = [x.exp() for x in b.means()]
    odds = [x / (1 - x) for x in y]
    terms = [y[i].log() + 0.1 * log_sigmoid((odds[i] / odds[i + 2]).log()) for i in range(2)]
    return -sum(terms) / 2  # type: ignore[return-value]


def plain_simpo(b: Batch) -> Tensor:
    """SimPO of two pairs: the margin of the mean log-probabilities, without a reference model."""
    y = b.means()
    return -sum(log_sigmoid(2.0 * (y[i] - y[i + 2]) - 1.0) for i in range(2)) / 2  # type: ignore[return-value]


def plain_kto(b: Batch) -> Tensor:
    """KTO: sequences 0 and 1 are desirable, 2 and 3 are not."""
    y, ref, other, ref_other = b.sums(), b.pairs[:2].flatten(), b.pairs[2], b.pairs[3]
    kl = max(float((other - ref_other).mean()), 0.0)
    signs = (1, 1, -1, -1)
    values = [1 / (1 + (-0.1 * c * (y[i] - ref[i] - kl)).exp()) for i, c in enumerate(signs)]
    return sum(1 - value for value in values) / 4  # type: ignore[return-value]


def plain_grpo(b: Batch) -> Tensor:
    """GRPO by token: clipped ratio, 0.04 of the divergence from a reference, 0.01 of entropy."""
    each = []
    for s, at in b.counts():
        tokens = []
        for t in at:
            logp, p, gain = b.logp(s, t), b.p(s, t), b.gain[s]
            ratio = logp.exp() / b.old[s, t].exp()
            bounded = min(max(float(ratio.detach()), 0.8), 1.2)
            kept = min(ratio * gain, bounded * gain)
            gap = b.ref[s, t] - logp
            tokens.append(0.04 * (gap.exp() - gap - 1) - kept + 0.01 * (p * p.log()).sum())
        each.append(sum(tokens) / len(tokens))
    return sum(each) / len(each)


def plain_distillation(b: Batch) -> Tensor:
    """The divergence of the student from the teacher, both at temperature 2."""
    each = []
    for s, at in b.counts():
        tokens = []
        for t in at:
            p, q = (
                (head @ state[s, t] / 2).exp()
                for head, state in ((b.head, b.hidden), (b.teacher_head, b.teacher))
            )
            p, q = p / p.sum(), q / q.sum()
            tokens.append((q * (q / p).log()).sum())
        each.append(torch.stack(tokens).mean())
    return torch.stack(each).mean()


def plain_on_policy_distillation(b: Batch) -> Tensor:
    """The log-ratio to the teacher is a constant that weights each log-probability."""
    each = []
    for s, at in b.counts():
        y = [(b.logp(s, t), b.ref[s, t]) for t in at]
        each.append(sum((x.detach() - ref) * x for x, ref in y) / len(at))
    return sum(each) / len(each)


def from_recipe(name: str, recipes: ModuleType, b: Batch) -> Tensor:
    """The loss of the recipe ``name`` for this batch."""
    counted = b.mask[:, 1:]
    if name == "grpo":
        import torchkiln  # noqa: PLC0415

        rows = counted.flatten().nonzero().squeeze(1)
        hidden, target = b.hidden[:, :-1], b.tokens[:, 1:]
        logp, entropy = torchkiln.linear_logprob(hidden, b.head, target, rows=rows, entropy=True)
        return recipes.grpo(logp, b.old, b.ref, entropy, b.gain, counted, bonus=0.01)
    logp = recipes.token_logp(b.hidden, b.head, b.tokens, b.mask)
    if name == "sft":
        return recipes.sft(logp, counted)
    if name == "on_policy_distillation":
        return recipes.on_policy_distillation(logp, b.ref, counted)
    if name in {"orpo", "simpo"}:
        return getattr(recipes, name)(*recipes.mean(logp, counted).chunk(2))
    if name == "dpo":
        return recipes.dpo(*logp.sum(-1).chunk(2), *b.pairs[:2])
    is_good = torch.tensor([True, True, False, False])
    return recipes.kto(logp.sum(-1), b.pairs[:2].flatten(), is_good, *b.pairs[2:])


def of_two_heads(recipes: ModuleType, b: Batch) -> Tensor:
    """The loss of the distillation recipe, which has two heads."""
    states, teacher = b.hidden[:, :-1], b.teacher[:, :-1]
    return recipes.distillation(states, b.head, teacher, b.teacher_head, b.mask[:, 1:])


PLAIN: dict[str, Callable[[Batch], Tensor]] = {
    "sft": plain_sft,
    "dpo": plain_dpo,
    "orpo": plain_orpo,
    "simpo": plain_simpo,
    "kto": plain_kto,
    "grpo": plain_grpo,
    "distillation": plain_distillation,
    "on_policy_distillation": plain_on_policy_distillation,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PLAIN)
def test_a_recipe_is_its_formula(name: str, seed: int, recipes: ModuleType) -> None:
    batch = Batch(seed)
    given = (batch.hidden, batch.head)
    is_distilled = name == "distillation"
    found = of_two_heads(recipes, batch) if is_distilled else from_recipe(name, recipes, batch)
    truth = PLAIN[name](batch)
    torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(found, given), torch.autograd.grad(truth, given), strict=True
    ):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [*PLAIN, "trl_logprob", "trl_divergence", "verl_logprob"])
def test_a_recipe_is_short(name: str, recipes: ModuleType) -> None:
    body = inspect.getsource(getattr(recipes, name)).rpartition('"""')[2]
    assert 0 < len(body.strip().splitlines()) <= MOST_LINES


def test_a_sequence_without_counted_tokens_is_no_nan(recipes: ModuleType) -> None:
    logp, mask = torch.randn(2, 4, requires_grad=True), torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0]])
    assert torch.equal(recipes.mean(logp, mask)[0].detach(), torch.tensor(0.0))
    assert torch.equal(recipes.sft(logp, torch.zeros(2, 4)).detach(), torch.tensor(0.0))


def test_grpo_raises_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    try:
        curve = import_module("grpo").main(40)
    finally:
        torch.set_num_threads(threads)
    assert sum(curve[:5]) / 5 < 0.2
    assert sum(curve[-5:]) / 5 > 0.4
