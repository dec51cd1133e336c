"""Losses of post-training, as functions of log-probabilities that torchkiln.linear_logprob returns.

``logp``, ``old``, ``ref``, ``teacher`` and ``entropy`` are ``[sequences, tokens]``, and 0 where
``mask`` is false. ``chosen``, ``rejected`` and their ``ref_`` forms are ``[pairs]``: sums over a
sequence, or means where a recipe says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln


def token_logp(hidden: Tensor, head: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """The log-probability of each next token; the others cost no product."""
    target, counted = tokens[:, 1:], mask[:, 1:]
    return torchkiln.linear_logprob(hidden[:, :-1], head, target, rows=counted)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens of each sequence."""
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def sft(logp: Tensor, mask: Tensor) -> Tensor:
    """Supervised fine-tuning: the mean over all tokens that the mask selects."""
    return -(logp * mask).sum() / mask.sum().clamp(min=1)


def dpo(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    """Direct preference optimisation, from sums over sequences."""
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -F.logsigmoid(beta * margin).mean()


def orpo(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Odds-ratio preference optimisation, from means over sequences."""
    odds = chosen - torch.log1p(-chosen.exp()) - rejected + torch.log1p(-rejected.exp())
    return -(chosen + beta * F.logsigmoid(odds)).mean()


def simpo(chosen: Tensor, rejected: Tensor, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """Simple preference optimisation, from means over sequences; no reference model."""
    return -F.logsigmoid(beta * (chosen - rejected) - gamma).mean()


def kto(
    logp: Tensor,
    ref: Tensor,
    is_good: Tensor,
    other: Tensor,
    ref_other: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """Kahneman-Tversky optimisation, from sums over sequences.

    ``other`` and ``ref_other`` are those of completions of other prompts: they estimate the KL.
    """
    reference = (other - ref_other).mean().clamp(min=0).detach()
    advantage = logp - ref - reference
    return (1 - torch.sigmoid(beta * torch.where(is_good, advantage, -advantage))).mean()


def grpo(
    logp: Tensor,
    old: Tensor,
    ref: Tensor,
    entropy: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    beta: float = 0.04,
    bonus: float = 0.0,
) -> Tensor:
    """Group-relative policy optimisation: clipped ratios, KL to a reference, entropy bonus."""
    ratio, gain = (logp - old).exp(), advantage.unsqueeze(-1)
    kept = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    kl = (ref - logp).exp() - (ref - logp) - 1
    return mean(beta * kl - kept - bonus * entropy, mask).mean()


def distillation(
    hidden: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, mask: Tensor
) -> Tensor:
    """The divergence from the teacher; tokens that the mask leaves out cost no product."""
    kl = torchkiln.linear_kl(hidden, head, teacher, teacher_head, temperature=2.0, rows=mask)
    return mean(kl, mask).mean()


def on_policy_distillation(logp: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Has the expected gradient of the reverse KL, for tokens that the student has drawn."""
    gap = (logp - teacher).detach()
    return mean(gap * logp, mask).mean()


def like(x: Tensor, other: Tensor | None) -> Any:
    """The other tensor in the dtype of ``x``."""
    return None if other is None else other.to(x.dtype)


def trl_logprob(trls: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the place of ``trls``, the ``apply`` of TRL's ChunkedLogProbFunction."""

    def apply(*args: Any) -> Any:
        x, weight, bias, target, temperature, _, softcap, scale, outputs = args
        if not {"log_probs", "entropy"}.issuperset(outputs):
            return trls(*args)
        # The scale multiplies the logits before the softcap.
        options = {"temperature": temperature / scale, "softcap": softcap and softcap / scale}
        head = (like(x, weight), target, like(x, bias))
        logp, entropy = torchkiln.linear_logprob(x, *head, entropy=True, **options)
        return logp, entropy if "entropy" in outputs else None, None, None, None

    return apply


def trl_divergence(trls: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the place of ``trls``, the ``apply`` of TRL's ChunkedDivergenceFunction."""

    def apply(*args: Any) -> Any:
        (x, weight, bias, *teacher), (beta, temperature, *changes) = args[:6], args[6:]
        if changes != [1, None, 1, None]:  # scales and softcaps
            return trls(*args)
        weight, bias = like(x, weight), like(x, bias)
        y, weight_y, bias_y = (like(x, t if t is None else t.detach()) for t in teacher)
        kind: Any = {0: "forward", 1: "reverse"}.get(beta, "js")
        layers, hot = (x, weight, y, weight_y, bias, bias_y), {"temperature": temperature}
        found = torchkiln.linear_kl(*layers, direction=kind, beta=beta, **hot)
        with torch.no_grad():  # the entropy is a metric
            target = torch.zeros_like(found, dtype=torch.int64)
            return found, torchkiln.linear_logprob(x, weight, target, bias, entropy=True, **hot)[1]

    return apply


def verl_logprob(
    _module: Any,
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Takes the place of the ``forward`` of verl's FusedLinearForPPO."""
    weight, target = like(hidden_states, vocab_weights), input_ids.to(torch.int64)
    return torchkiln.linear_logprob(
        hidden_states, weight, target, temperature=temperature, entropy=True
    )
