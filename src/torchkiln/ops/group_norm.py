"""Group norm and activation."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops.eager import eager
from torchkiln.typing import Activation


@eager(_C.group_norm, input="x")
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    act: Activation = "none",
) -> Tensor:
    """Returns ``act((x - mean) / sqrt(variance + eps) * weight + bias)``.

    Mean and variance are taken over each group of a sample: all pixels of ``channels / num_groups``
    adjacent channels. All is computed in float32 (float64 for float64) and rounded once;
    statistics stay exact where the mean is far from 0. Backward keeps ``x`` and computes the
    argument of the activation again. The gradients are bitwise reproducible.

    Args:
        x: ``[batch, channels, ...]``; float32, float64, float16 or bfloat16. Contiguous tensors and
            those with adjacent channels (``channels_last``) are read without a copy; the result has
            the same layout.
        num_groups: a divisor of the channels.
        weight: ``[channels]``; of the dtype of ``x``, or float32 if ``x`` has half precision.
        bias: of the shape and dtype of ``weight``.
        eps: a number of at least 0.
        act: an activation, or none.
    """
    return torch.ops.torchkiln.group_norm.default(x, num_groups, weight, bias, eps, act=act)
