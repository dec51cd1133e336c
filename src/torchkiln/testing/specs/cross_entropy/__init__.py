"""The contracts of cross-entropy, of logits and of a linear layer."""

from torchkiln.testing.specs.cross_entropy.linear import LINEAR_CROSS_ENTROPY
from torchkiln.testing.specs.cross_entropy.logits import (
    CROSS_ENTROPY,
    classes,
    probabilities,
    reference,
)

__all__ = ["CROSS_ENTROPY", "LINEAR_CROSS_ENTROPY", "classes", "probabilities", "reference"]
