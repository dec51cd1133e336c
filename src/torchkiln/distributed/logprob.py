"""Log-probabilities and entropies of classes that are distributed over processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from torchkiln.distributed.class_shards import (
    ClassShard,
    LossOptions,
    check_softcap,
    check_target,
    check_temperature,
    class_shard,
    compute_dtype,
    gather_into,
    layer_in_autocast,
    local_of,
    shard_of_distributed,
)
from torchkiln.distributed.linear_loss import Gradients, LogitShard, add_product

NAME, LINEAR_NAME = "vocab_parallel_logprob", "vocab_parallel_linear_logprob"
MAXIMUM, SUM, OWN, HAS, MOMENT = range(5)
"""Indices of the numbers of a row in the result of ``_logprob_shard``."""

Settings = tuple[ClassShard, float, int, bool]
"""The shard, the temperature, the ignored class, and whether the entropy is wanted."""


def numbers_of(logits: Tensor, target: Tensor, settings: Settings) -> Tensor:
    """The numbers of rows of the shard, ``[5, rows]``."""
    shard, temperature, ignored, _ = settings
    found: Tensor = torch.ops.torchkiln._logprob_shard.default(
        logits, target, temperature, ignored, shard.first, shard.classes
    )
    return found


def joined(own: Tensor, target: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and state of whole rows; communicates once."""
    shard, _, ignored, entropy = settings
    own = own if entropy else own[:MOMENT]
    parts = own.new_empty(dist.get_world_size(shard.group), *own.shape)
    gather_into(parts.flatten(0, 1), own.contiguous(), group=shard.group)
    return join(parts, target == ignored)


def join(parts: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of :func:`joined` from the numbers of shards, ``[shards, 4 or 5, rows]``.

    The state is ``[3, rows]``: log-sum-exp, the factor of the exponentials, and the entropy.
    """
    is_empty = parts[:, SUM] == 0  # all logits of a shard are -infinity
    maximum = parts[:, MAXIMUM].masked_fill(is_empty, -torch.inf).amax(0)
    distance = (parts[:, MAXIMUM] - maximum).masked_fill(is_empty, 0)
    factor = distance.exp()
    total = (parts[:, SUM] * factor).sum(0)
    log_sum = total.log()
    own = torch.where(parts[:, HAS] > 0, parts[:, OWN] + distance, 0)
    logp = own.sum(0) - log_sum
    entropy = torch.zeros_like(logp)
    if parts.shape[1] > MOMENT:
        distance = distance.masked_fill(factor == 0, 0)  # otherwise infinity * 0 gives NaN
        moment = (factor * (parts[:, MOMENT] + distance * parts[:, SUM])).sum(0)
        entropy = (log_sum - moment / total).masked_fill(ignored, 0)
    log_sum_exp = maximum + log_sum
    # The kernel subtracts the rounded log_sum_exp; the mass corrects for the rounding.
    rounding = (maximum - log_sum_exp) + log_sum
    mass = torch.where(rounding.isfinite(), (-rounding).exp(), 1)
    return logp.masked_fill(ignored, 0), entropy, torch.stack([log_sum_exp, mass, entropy])


def gradient_of(
    grads: Sequence[Tensor], logits: Tensor, target: Tensor, state: Tensor, settings: Settings
) -> Tensor:
    """The gradient of the logits of the shard, from the gradients of both results."""
    shard, temperature, ignored, _ = settings
    found: Tensor = torch.ops.torchkiln._logprob_shard_backward.default(
        *(grads[0], logits, target, grads[1], state),
        *(temperature, ignored, shard.first, shard.classes),
    )
    return found


class ShardedLogprob(torch.autograd.Function):
    """Log-probabilities and entropies of rows of logits. Backward does not communicate."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        """The results, equal on all processes."""
        logp, entropy, state = joined(numbers_of(logits, target, settings), target, settings)
        ctx.settings = settings
        ctx.save_for_backward(logits, target, state)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the logits of this process."""
        logits, target, state = ctx.saved_tensors
        return gradient_of(grads, logits, target, state, ctx.settings), None, None


class LogprobLayer(LogitShard):
    """A layer whose logits are not rounded to the dtype of x."""

    def logits(self, rows: slice) -> Tensor:
        """The logits of some rows, with the softcap."""
        x = self.x[rows]
        shape = (x.shape[0], self.weight.shape[0])
        logits = x.new_zeros(shape, dtype=compute_dtype(x.dtype))
        add_product(logits, x, self.weight.T)
        if self.bias is not None:
            logits.add_(self.bias)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


class ShardedLinearLogprob(torch.autograd.Function):
    """Log-probabilities and entropies of a layer. Backward adds all processes' gradients of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        softcap: float | None,
        settings: Settings,
    ) -> tuple[Tensor, Tensor]:
        """The results, equal on all processes."""
        layer = layer_of(x, weight, bias, target, softcap, settings)
        numbers = [numbers_of(layer.logits(r), target[r], settings) for r in layer.chunks()]
        logp, entropy, state = joined(torch.cat(numbers, 1), target, settings)
        ctx.softcap, ctx.settings = softcap, settings
        ctx.save_for_backward(x, weight, bias, target, state)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias."""
        x, weight, bias, target, state = ctx.saved_tensors
        layer = layer_of(x, weight, bias, target, ctx.softcap, ctx.settings)
        gradients = Gradients(layer, ctx.needs_input_grad[:3])
        for rows in layer.chunks():
            logits, some = layer.logits(rows), [grad[rows] for grad in grads]
            of_rows = state[:, rows].contiguous()
            found = gradient_of(some, logits, target[rows], of_rows, ctx.settings)
            if ctx.softcap is not None:
                found.mul_(logits.div_(ctx.softcap).square_().neg_().add_(1))
            gradients.add(rows, found.to(x.dtype))
        of_x, of_weight, of_bias = gradients.parts()
        if of_x is not None:
            dist.all_reduce(of_x, group=ctx.settings[0].group)
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        return of_x, of_weight, of_bias, None, None, None


def layer_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    softcap: float | None,
    settings: Settings,
) -> LogprobLayer:
    """The layer of a call; the kernels apply the temperature."""
    options = LossOptions(settings[0], settings[2], "none", 0.0, 0.0, compute_dtype(x.dtype))
    return LogprobLayer(x, weight, bias, target, None, softcap, 1.0, options)


def counted_rows(op: str, rows: Tensor, shape: torch.Size) -> Tensor:
    """The indices of the rows that count, from indices or a mask of this shape."""
    is_mask = rows.dtype == torch.bool
    if not (rows.shape == shape if is_mask else rows.dtype == torch.int64 and rows.ndim == 1):
        raise ValueError(
            f"torchkiln.{op}: rows: got {rows.dtype} {list(rows.shape)}, expected "
            f"torch.int64 [any], indices of rows, or torch.bool {list(shape)}, a mask"
        )
    return rows.reshape(-1).nonzero().squeeze(-1) if is_mask else rows


def among_zeros(found: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """The results of some rows in the place of all."""
    return found.new_zeros(shape.numel()).index_copy(0, rows, found).view(shape)


def results(found: Sequence[Tensor], target: Tensor, entropy: bool) -> Any:
    """The results of a call in the shape of its target."""
    logp, other = (each.view(target.shape) for each in found)
    return (logp, other) if entropy else logp


def vocab_parallel_logprob(
    logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    classes: int | None = None,
    first_class: int | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Any:
    """Returns :func:`torchkiln.logprob` of logits whose classes are distributed.

    All processes get the results over all classes. Forward gathers four numbers per row and
    process, five with ``entropy``; backward does not communicate. There is no second derivative.
    ``logits``, ``target``, ``group``, ``classes`` and ``first_class`` are those of
    :func:`vocab_parallel_cross_entropy`, the other arguments those of :func:`torchkiln.logprob`.
    """
    check_temperature(NAME, temperature)
    if isinstance(logits, DTensor):
        shard = shard_of_distributed(NAME, logits, -1)
        logits, target = local_of(logits), local_of(target)
    else:
        shard = class_shard(NAME, logits.shape[-1], group, classes, first_class)
    check_target(NAME, target, logits.shape[:-1])
    found: Any = ShardedLogprob.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        (shard, temperature, ignore_index, entropy),
    )
    return results(found, target, entropy)


def vocab_parallel_linear_logprob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    classes: int | None = None,
    first_class: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    rows: Tensor | None = None,
    ignore_index: int = -100,
    entropy: bool = False,
) -> Any:
    """Returns :func:`torchkiln.linear_logprob` of a layer whose classes are distributed.

    Each process has the rows of ``weight`` for some adjacent classes, or a ``DTensor`` that is
    sharded in its first dimension, over one mesh dimension, and the whole ``x``. Logits are
    computed for a chunk of rows at a time, again in backward. Forward gathers four numbers per row
    and process once, five with ``entropy``; backward adds the gradients of ``x`` of all processes.
    There is no second derivative. ``x``, ``target`` and ``rows`` are equal on all processes; a
    ``DTensor`` ``x`` is replicated. Rows that ``rows`` leaves out cost neither product nor
    communication. Arguments are those of :func:`vocab_parallel_logprob` and
    :func:`torchkiln.linear_logprob`.
    """
    check_softcap(LINEAR_NAME, softcap)
    check_temperature(LINEAR_NAME, temperature)
    if isinstance(weight, DTensor):
        shard = shard_of_distributed(LINEAR_NAME, weight, 0)
        weight, bias = local_of(weight), local_of(bias)
    else:
        shard = class_shard(LINEAR_NAME, weight.shape[0], group, classes, first_class)
    target, rows = local_of(target), local_of(rows)
    x, weight, bias = layer_in_autocast(local_of(x), weight, bias)
    check_target(LINEAR_NAME, target, x.shape[:-1])
    if weight.shape[1:] != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"torchkiln.{LINEAR_NAME}: weight: got {weight.dtype} {list(weight.shape)}, expected "
            f"{x.dtype} [classes of this process, {x.shape[-1]}]: the dtype and the last size of x"
        )
    x, classes_of_rows = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    some = None if rows is None else counted_rows(LINEAR_NAME, rows, target.shape)
    if some is not None:
        x, classes_of_rows = x.index_select(0, some), classes_of_rows.index_select(0, some)
    with torch.autocast(x.device.type, enabled=False):
        found: Any = ShardedLinearLogprob.apply(  # type: ignore[no-untyped-call]
            *(x.contiguous(), weight, bias, classes_of_rows),
            *(softcap, (shard, temperature, ignore_index, entropy)),
        )
    if some is not None:
        found = [among_zeros(each, some, target.shape) for each in found]
    return results(found, target, entropy)
