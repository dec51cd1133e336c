"""Dropout and the following residual sum, in one pass over memory."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._eager import eager


@eager(_C.dropout_add)
def dropout_add(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Returns ``x * mask / (1 - p) + residual``, contiguous; ``x + residual`` unless ``training``.

    Each element of ``mask`` is 0 with probability ``p``, else 1. It depends only on the state of
    torch's generator for the device, on ``p``, and on the row-major index of the element. Backward
    computes the mask again instead of reading it from memory.

    Args:
        x: any shape; float32, float64, float16 or bfloat16. Half precision is computed in float32
            and rounded once.
        residual: of the shape and dtype of ``x``.
        p: the probability that an element is dropped, between 0 and 1.
        training: whether to drop elements.
    """
    return torch.ops.torchkiln.dropout_add.default(x, residual, p, training)


@eager(_C.bias_dropout_add)
def bias_dropout_add(
    x: Tensor, bias: Tensor, residual: Tensor, p: float = 0.5, training: bool = True
) -> Tensor:
    """Returns ``(x + bias) * mask / (1 - p) + residual``, contiguous.

    Args:
        x: ``[..., columns]``; dtypes as for :func:`dropout_add`.
        bias: ``[columns]``; of the dtype of ``x``, or float32 if ``x`` has half precision.
        residual: as for :func:`dropout_add`.
        p: as for :func:`dropout_add`.
        training: as for :func:`dropout_add`.
    """
    return torch.ops.torchkiln.bias_dropout_add.default(x, bias, residual, p, training)
