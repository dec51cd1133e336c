"""Cross-entropy, log-probabilities and divergences, of logits or of a linear layer's outputs."""

from torchkiln.ops.cross_entropy.losses import (
    CrossEntropyOutput,
    cross_entropy,
    linear_cross_entropy,
)
from torchkiln.ops.cross_entropy.per_row import linear_kl, linear_logprob, logprob

__all__ = [
    "CrossEntropyOutput",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_kl",
    "linear_logprob",
    "logprob",
]
