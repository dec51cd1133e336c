"""Cross-entropy of logits whose classes are distributed over processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from torchkiln.distributed.class_shards import (
    LossOptions,
    check_reduction,
    check_softcap,
    check_target,
    class_shard,
    compute_dtype,
    dtype_of_loss,
    gradient_of_logits,
    local_of,
    numbers_of_rows,
    reduced,
    shard_of_distributed,
)

NAME = "vocab_parallel_cross_entropy"


class ShardedLoss(torch.autograd.Function):
    """The loss of rows of logits. Backward does not communicate."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions
    ) -> Tensor:
        """The loss, equal on all processes."""
        rows = numbers_of_rows(logits, target, weight, options)
        loss, divisor = reduced(rows, options)
        ctx.options = options
        ctx.save_for_backward(logits, target, weight, rows.state, divisor)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the logits of this process."""
        logits, target, weight, state, divisor = ctx.saved_tensors
        scale = grad.to(state.dtype) / divisor
        return (
            gradient_of_logits(scale, logits, target, weight, state, ctx.options),
            None,
            None,
            None,
        )


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
    weight: Tensor | None = None,
    *,
    classes: int | None = None,
    first_class: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_dtype: torch.dtype | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Returns :func:`torchkiln.cross_entropy` of logits whose classes are distributed.

    Each process of ``group`` has the logits of some adjacent classes, in the order of the ranks.
    All processes get the loss over all classes. Forward gathers four numbers per row and process,
    or five with ``weight``; backward does not communicate. A process stores the gradient of its
    logits, and no other tensor of that size. Half precision is computed in float32. There is no
    second derivative.

    ``logits`` is ``[..., classes of this process]``, or a ``DTensor`` whose classes are sharded
    over one mesh dimension. A ``DTensor`` replaces ``group``, ``classes`` and ``first_class``; the
    loss then covers the rows of this process. ``group``: the processes, None for all. ``classes``:
    the number of classes of all processes, if it is no multiple of the number of processes; shards
    are then those of :func:`torch.chunk`, as in ``DTensor``. None: all shards have as many classes
    as this one. ``first_class``: the first class of this process, for shards of other sizes.

    ``target``, int64, is equal on all processes and counts classes over all processes; ``weight``
    holds the classes of this process. The other arguments are those of
    :func:`torchkiln.cross_entropy`.
    """
    check_reduction(NAME, reduction)
    check_softcap(NAME, softcap)
    if isinstance(logits, DTensor):
        shard = shard_of_distributed(NAME, logits, -1)
        logits, target, weight = local_of(logits), local_of(target), local_of(weight)
    else:
        shard = class_shard(NAME, logits.shape[-1], group, classes, first_class)
    check_target(NAME, target, logits.shape[:-1])
    dtype = dtype_of_loss(logits, loss_dtype)
    options = LossOptions(shard, ignore_index, reduction, label_smoothing, z_loss, dtype)
    if softcap is not None:
        logits = (logits.to(compute_dtype(logits.dtype)) / softcap).tanh() * softcap
        weight = None if weight is None else weight.to(logits.dtype)
    rows = logits.reshape(-1, logits.shape[-1])
    loss: Tensor = ShardedLoss.apply(  # type: ignore[no-untyped-call]
        rows, target.reshape(-1), weight, options
    )
    return loss.view(target.shape) if reduction == "none" else loss
