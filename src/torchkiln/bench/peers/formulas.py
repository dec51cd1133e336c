"""Losses of post-training as libraries compute them from stored logits, and torch's own function.

``trl`` stands for what TRL does, written with torch's ops: logits in the dtype of the model; their
log-probabilities a sequence at a time, in half precision from a log-softmax of all classes; the
entropy from a second log-softmax, 128 rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchkiln.bench.case import BenchCase, Function
from torchkiln.bench.peers.package import Refused

SEQUENCE = 2048
"""Rows of a sequence; more rows are several sequences."""
ENTROPY_ROWS = 128


def logp_of_sequence(logits: Tensor, target: Tensor) -> Tensor:
    """The log-probabilities of the targets of one sequence."""
    at = target.unsqueeze(-1)
    if logits.dtype in (torch.float32, torch.float64):
        return logits.gather(-1, at).squeeze(-1) - logits.logsumexp(-1)
    return F.log_softmax(logits, -1).gather(-1, at).squeeze(-1)


def entropy_of_rows(logits: Tensor) -> Tensor:
    """The entropy of each row of logits."""
    logs = F.log_softmax(logits, -1)
    return -(logs.exp() * logs).sum(-1)


def logprob(logits: Tensor, target: Tensor, *, entropy: bool = False) -> Any:
    """Log-probabilities and entropies of rows of logits."""
    parts = zip(logits.split(SEQUENCE), target.split(SEQUENCE), strict=True)
    logp = torch.cat([logp_of_sequence(*part) for part in parts])
    if not entropy:
        return logp
    return logp, torch.cat([entropy_of_rows(part) for part in logits.split(ENTROPY_ROWS)])


def linear_logprob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    entropy: bool = False,
) -> Any:
    """logprob() of a linear layer. Results outside ``rows`` are computed, then multiplied by 0."""
    found = logprob(F.linear(x, weight, bias), target, entropy=entropy)
    if rows is None:
        return found
    counted = torch.zeros_like(target, dtype=torch.bool).index_fill(0, rows, value=True)
    return tuple(y * counted for y in found) if entropy else found * counted


def linear_kl(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    weight_y: Tensor,
    *,
    direction: str = "forward",
    beta: float = 0.5,
) -> Tensor:
    """The divergence of two layers, from the logits of both."""
    log_p, log_q = (F.log_softmax(F.linear(*layer), -1) for layer in ((x, weight), (y, weight_y)))

    def divergence(logs: Tensor, others: Tensor) -> Tensor:
        return F.kl_div(others, logs, reduction="none", log_target=True).sum(-1)

    if direction == "forward":
        return divergence(log_q, log_p)
    if direction == "reverse":
        return divergence(log_p, log_q)
    both = torch.stack([log_q + math.log(beta), log_p + math.log1p(-beta)])
    log_m = both.logsumexp(0)
    return beta * divergence(log_q, log_m) + (1 - beta) * divergence(log_p, log_m)


TRL: Mapping[str, Callable[..., Any]] = {
    "logprob": logprob,
    "linear_logprob": linear_logprob,
    "linear_kl": linear_kl,
}


def trl(case: BenchCase) -> Function:
    """TRL's formula of the op."""
    return TRL[case.spec.name]


TORCHS = frozenset({"linear_cross_entropy"})


def torchs(case: BenchCase) -> Function:
    """The function of torch.nn.functional with the name of the op."""
    found: Function | None = getattr(F, case.spec.name, None)
    if found is None:
        raise Refused(f"torch {torch.__version__} has no F.{case.spec.name}")
    return found
