"""The contracts of batch norm: as one op, of its parts, with a convolution and with a pool."""

from torchkiln.testing.forms import with_forms
from torchkiln.testing.specs.batch_norm import convolution, parts, sync, whole

BN_ACT = with_forms(
    whole.BN_ACT,
    parts.UPDATE,
    parts.FROM_MOMENTS,
    parts.POOL,
    sync.APART,
    sync.SYNC,
    convolution.CONV_BN_ACT,
    convolution.PIXEL_CONV,
)

__all__ = ["BN_ACT"]
