"""Batch norm, residual sum and activation."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from torchkiln import _C
from torchkiln.ops.eager import eager
from torchkiln.typing import Activation


@eager(_C.bn_act)
def bn_act(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    act: Activation = "relu",
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Returns ``act((x - mean) / sqrt(variance + eps) * weight + bias + residual)``.

    Mean and variance are computed per channel of ``x`` in training, else the running ones are used.
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
        residual: of the shape and dtype of ``x``; read without a copy if the layouts are equal.
        act: an activation, or none.
        training: whether to use the statistics of ``x``, which needs more than one value for each
            channel.
        momentum: the weight of the new statistics.
        eps: a number of at least 0.
    """
    updates = training and running_mean is not None
    ops = torch.ops.torchkiln
    op = ops._bn_act_update.default if updates else ops.bn_act.default
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


def _gathered(own: Tensor, group: Any) -> Tensor:
    """The tensors of all processes, ``[processes, numel]``."""
    every = own.new_empty(dist.get_world_size(group) * own.numel())
    if hasattr(dist, "all_gather_single"):  # its name since torch 2.13
        dist.all_gather_single(every, own, group=group)
    else:
        dist.all_gather_into_tensor(every, own, group=group)
    return every.view(-1, own.numel())


class _SyncForward(torch.autograd.Function):
    """``bn_act`` with statistics over all processes of a group, for torch.compile."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        statistics: Tensor,
        count: Tensor,
        act: Activation,
        group: Any,
    ) -> Tensor:
        y: Tensor
        y, signs = torch.ops.torchkiln._sync_bn_forward(x, statistics, weight, bias, residual, act)
        has_signs = residual is not None and act == "relu"
        keeps_residual = residual is not None and act not in ("relu", "none")
        ctx.save_for_backward(
            x,
            weight,
            bias,
            residual if keeps_residual else None,
            statistics,
            count,
            signs if has_signs else None,
        )
        ctx.act, ctx.group = act, group
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, residual, statistics, count, signs = ctx.saved_tensors
        act, wanted = ctx.act, list(ctx.needs_input_grad[:4])
        passes = wanted[3] and act == "none"  # the residual's gradient is the incoming one
        coefficients, *found = torch.ops.torchkiln._sync_bn_backward_sums(
            grad,
            x,
            statistics,
            count,
            weight,
            bias,
            residual,
            signs,
            act,
            [*wanted[:3], wanted[3] and not passes],
        )
        gradients = [g if wants else None for g, wants in zip(found, wanted[1:], strict=True)]
        grad_x = None
        if wanted[0]:
            dist.all_reduce(coefficients, group=ctx.group)
            if wanted[3] and act == "relu":  # the residual and relu's argument share one gradient
                grad, act, signs = found[2], "none", None
            grad_x = torch.ops.torchkiln._sync_bn_backward_input(
                grad, x, statistics, coefficients, weight, bias, residual, signs, act
            )
        if passes:
            gradients[2] = grad
        return grad_x, *gradients, None, None, None, None


def sync_bn_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None,
    *,
    act: Activation,
    momentum: float | Tensor,
    eps: float,
    group: Any,
    moments: Tensor | None = None,
) -> Tensor:
    """:func:`bn_act` in training, with common statistics of all processes of a group.

    Forward gathers ``2 * channels + 1`` numbers from each process, backward adds ``2 * channels``
    numbers over the processes. The host waits for neither. The gradients of weight and bias are
    local; ``DistributedDataParallel`` averages them. There is no second derivative.

    The arguments are those of :func:`bn_act`. Batch sizes may differ between processes, and a batch
    may be empty. ``momentum`` may be an int64 tensor, the number of batches: new statistics then
    have the weight ``1 / momentum``. ``moments`` are those of ``x``, if computed before.
    """
    batches, weight_of_new = (momentum, 0.0) if isinstance(momentum, Tensor) else (None, momentum)
    if not is_compiling():
        y: Tensor = _C._sync_bn_act(
            x,
            weight,
            bias,
            running_mean,
            running_var,
            residual,
            batches,
            moments,
            act,
            weight_of_new,
            eps,
            group.group_name,
        )
        return y
    with torch.no_grad():  # torch.compile records the collectives
        own = torch.ops.torchkiln._sync_bn_moments(x) if moments is None else moments
        statistics, count = torch.ops.torchkiln._sync_bn_statistics(
            x, _gathered(own, group), running_mean, running_var, batches, weight_of_new, eps
        )
    apply: Callable[..., Tensor] = _SyncForward.apply
    return apply(x, weight, bias, residual, statistics, count, act, group)
