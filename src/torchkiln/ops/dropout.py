"""Dropout and the residual sum that follows it, in one pass over memory."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._eager import eager


@eager(_C.dropout_add)
def dropout_add(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Returns ``x * mask / (1 - p) + residual``, contiguous; ``x + residual`` unless ``training``.

    Each element of ``mask`` is 0 with probability ``p``, else 1. It comes from torch's generator of
    the device, and depends on nothing but that, ``p`` and the place of the element in row-major
    order; it is not kept for backward, but drawn again.

    Args:
        x: any shape; float32, float64, float16 or bfloat16. A half precision is computed in
            float32 and rounded once.
        residual: of the shape and dtype of ``x``.
        p: between 0 and 1.
        training: whether to drop anything.
    """
    return torch.ops.torchkiln.dropout_add.default(x, residual, p, training)


@eager(_C.bias_dropout_add)
def bias_dropout_add(
    x: Tensor, bias: Tensor, residual: Tensor, p: float = 0.5, training: bool = True
) -> Tensor:
    """Returns ``(x + bias) * mask / (1 - p) + residual``, contiguous.

    Args:
        x: ``[..., columns]``, else as for :func:`dropout_add`.
        bias: ``[columns]``; of the dtype of ``x``, or float32 beside a half precision.
        residual: as for :func:`dropout_add`.
        p: as for :func:`dropout_add`.
        training: as for :func:`dropout_add`.
    """
    return torch.ops.torchkiln.bias_dropout_add.default(x, bias, residual, p, training)
