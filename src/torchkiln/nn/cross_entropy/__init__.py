"""Modules of cross-entropy, log-probabilities and divergences."""

from torchkiln.nn.cross_entropy.linear import LinearCrossEntropyLoss, LinearKL, LinearLogprob
from torchkiln.nn.cross_entropy.logits import CrossEntropyLoss, Logprob

__all__ = [
    "CrossEntropyLoss",
    "LinearCrossEntropyLoss",
    "LinearKL",
    "LinearLogprob",
    "Logprob",
]
