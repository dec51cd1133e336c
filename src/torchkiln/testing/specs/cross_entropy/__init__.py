"""The contracts of cross-entropy, of logits and of a linear layer."""

from torchkiln.testing.forms import with_forms
from torchkiln.testing.specs.cross_entropy import linear, logits, metrics
from torchkiln.testing.specs.cross_entropy.linear_kl import LINEAR_KL
from torchkiln.testing.specs.cross_entropy.linear_logprob import LINEAR_LOGPROB
from torchkiln.testing.specs.cross_entropy.logits import classes, probabilities, reference
from torchkiln.testing.specs.cross_entropy.logprob import LOGPROB

CROSS_ENTROPY = with_forms(logits.CROSS_ENTROPY, metrics.LOGITS)
LINEAR_CROSS_ENTROPY = with_forms(linear.LINEAR_CROSS_ENTROPY, metrics.LINEAR)

__all__ = [
    "CROSS_ENTROPY",
    "LINEAR_CROSS_ENTROPY",
    "LINEAR_KL",
    "LINEAR_LOGPROB",
    "LOGPROB",
    "classes",
    "probabilities",
    "reference",
]
