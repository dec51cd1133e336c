"""Ops on several devices: parallel styles, losses with distributed classes, rules for DTensor."""

from torchkiln.distributed.divergence import vocab_parallel_linear_kl
from torchkiln.distributed.linear_loss import vocab_parallel_linear_cross_entropy
from torchkiln.distributed.logprob import vocab_parallel_linear_logprob, vocab_parallel_logprob
from torchkiln.distributed.loss import vocab_parallel_cross_entropy
from torchkiln.distributed.rules import register_rule
from torchkiln.distributed.styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "register_rule",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_kl",
    "vocab_parallel_linear_logprob",
    "vocab_parallel_logprob",
]
