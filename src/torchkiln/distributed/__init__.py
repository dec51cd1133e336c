"""Ops on several devices: losses of distributed classes, and rules for DTensor."""

from torchkiln.distributed.linear_loss import vocab_parallel_linear_cross_entropy
from torchkiln.distributed.loss import vocab_parallel_cross_entropy
from torchkiln.distributed.rules import register_rule

__all__ = [
    "register_rule",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
