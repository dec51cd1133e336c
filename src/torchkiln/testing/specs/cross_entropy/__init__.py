"""The contracts of cross-entropy, of logits and of a linear layer."""

from torchkiln.testing.forms import with_forms
from torchkiln.testing.specs.cross_entropy import linear, logits, logprob, metrics, shards
from torchkiln.testing.specs.cross_entropy.linear_kl import LINEAR_KL
from torchkiln.testing.specs.cross_entropy.linear_logprob import LINEAR_LOGPROB
from torchkiln.testing.specs.cross_entropy.logits import classes, probabilities, reference

CROSS_ENTROPY = with_forms(logits.CROSS_ENTROPY, metrics.LOGITS, shards.CROSS_ENTROPY)
LINEAR_CROSS_ENTROPY = with_forms(linear.LINEAR_CROSS_ENTROPY, metrics.LINEAR)
LOGPROB = with_forms(logprob.LOGPROB, shards.LOGPROB)

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
