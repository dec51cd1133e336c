"""Batch norm, residual sum and activation."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops.eager import eager


@eager(_C.bn_act)
def bn_act(  # noqa: PLR0917
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    act: str = "relu",
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Returns ``act((x - mean) / sqrt(variance + eps) * weight + bias + residual)``.

    Mean and variance are those of each channel of ``x`` in training, else the running ones.
    Training also moves the running statistics in place, as :func:`torch.nn.functional.batch_norm`
    does: ``running = (1 - momentum) * running + momentum * new``, with the unbiased variance. All
    is computed in float32 (float64 for float64) and rounded once; statistics stay exact where the
    mean is far from 0. The gradients are bitwise reproducible. Backward keeps ``x`` and, with a
    residual, one bit per element for relu, or the residual for other activations.

    Args:
        x: ``[batch, channels, ...]``; float32, float64, float16 or bfloat16. Contiguous tensors and
            those with adjacent channels (``channels_last``) are read without a copy; the result has
            the same layout.
        weight: ``[channels]``; of the dtype of ``x``, or float32 if ``x`` has half precision.
        bias: of the shape and dtype of ``weight``.
        running_mean: ``[channels]``; of the dtype of ``x``, or float32 if ``x`` has half precision.
            None only in training.
        running_var: of the shape and dtype of ``running_mean``.
        residual: of the shape and dtype of ``x``; read without a copy if it has its layout.
        act: one of none, square, relu, gelu, gelu_tanh, silu, sigmoid, tanh.
        training: whether to use the statistics of ``x``, which needs more than one value for each
            channel.
        momentum: the weight of the new statistics.
        eps: a number of at least 0.
    """
    updates = training and running_mean is not None
    ops = torch.ops.torchkiln
    op = ops.bn_act_update.default if updates else ops.bn_act.default
    return op(
        x,
        weight,
        bias,
        running_mean,
        running_var,
        residual,
        act=act,
        training=training,
        momentum=momentum,
        eps=eps,
    )
