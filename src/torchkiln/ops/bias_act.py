"""Bias and activation, fused into one pass over memory."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops.eager import eager
from torchkiln.typing import Activation


@eager(_C.bias_act)
def bias_act(x: Tensor, bias: Tensor, *, scale: float = 1.0, act: Activation = "relu") -> Tensor:
    """Returns ``act(x * scale + bias)``, of the dtype of ``x``.

    The result is computed in float32 (float64 for float64) and rounded once. One pass computes the
    gradients of ``x`` and ``bias``; the gradient of ``bias`` is bitwise reproducible.

    Args:
        x: ``[..., columns]``; float32, float64, float16 or bfloat16. The result has its strides if
            it is dense, such as a transposed matrix, else it is contiguous.
        bias: ``[columns]``; of the dtype of ``x``, or float32 if ``x`` has half precision.
        scale: a number.
        act: an activation, or none.
    """
    return torch.ops.torchkiln.bias_act.default(x, bias, scale=scale, act=act)
