"""Cross-entropy of a linear layer whose classes are distributed over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchkiln.distributed.class_shards import (
    LossOptions,
    Rows,
    check_reduction,
    check_softcap,
    check_target,
    check_temperature,
    class_shard,
    compute_dtype,
    dtype_of_loss,
    gradient_of_logits,
    layer_in_autocast,
    numbers_of_rows,
    reduced,
)

NAME = "vocab_parallel_linear_cross_entropy"
CHUNK_BYTES, LEAST_ROWS, MOST_ROWS = 1 << 30, 2048, 8192
"""Limits of a chunk, as for linear_cross_entropy."""


@dataclass
class LogitShard:
    """A linear layer whose outputs are the logits of the classes of this process."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    softcap: float | None
    temperature: float
    options: LossOptions

    def chunks(self) -> Iterator[slice]:
        """Slices of rows whose logits are in memory together; equal on all processes."""
        shard, rows = self.options.shard, self.x.shape[0]
        classes = -(-shard.classes // dist.get_world_size(shard.group))
        most = CHUNK_BYTES // (classes * self.x.element_size())
        most = min(max(most, LEAST_ROWS), MOST_ROWS)
        size = -(-rows // max(-(-rows // most), 1))
        for begin in range(0, max(rows, 1), max(size, 1)):  # one empty chunk if there are no rows
            yield slice(begin, begin + size)

    def logits(self, rows: slice) -> Tensor:
        """The logits of some rows, with softcap and temperature."""
        bias, x = self.bias, self.x[rows]
        scale = 1 / self.temperature if self.softcap is None else 1.0
        if bias is not None and bias.dtype == x.dtype:
            logits = torch.addmm(bias, x, self.weight.T, beta=scale, alpha=scale)
        else:
            # A product with a factor: beta=0 ignores the first argument.
            logits = torch.addmm(x.new_empty(1), x, self.weight.T, beta=0, alpha=scale)
            if bias is not None:
                logits.add_(bias, alpha=scale)
        if self.softcap is not None:
            logits = logits.to(compute_dtype(logits.dtype))
            logits.div_(self.softcap).tanh_().mul_(self.softcap / self.temperature)
        return logits

    def differentiate(self, grad: Tensor, rows: slice, logits: Tensor, state: Tensor) -> Tensor:
        """The gradient of the outputs of the layer, which may overwrite ``logits``."""
        if self.temperature != 1:
            grad = grad / self.temperature
        found = gradient_of_logits(
            grad, logits, self.target[rows], self.class_weight, state, self.options
        )
        if self.softcap is not None:
            bound = self.softcap / self.temperature
            found.mul_(logits.div_(bound).square_().neg_().add_(1))
        return found.to(self.x.dtype)


class Gradients:
    """The wanted gradients of x, weight and bias, added up from the gradients of chunks.

    The gradients of weight and bias are added in the compute dtype.
    """

    def __init__(self, layer: LogitShard, wanted: tuple[bool, bool, bool]) -> None:
        self.layer = layer
        dtype = compute_dtype(layer.x.dtype)
        of_x, of_weight, of_bias = wanted
        self.x = torch.empty_like(layer.x) if of_x else None
        self.weight = torch.zeros_like(layer.weight, dtype=dtype) if of_weight else None
        self.bias = None
        if of_bias and layer.bias is not None:
            self.bias = torch.zeros_like(layer.bias, dtype=dtype)

    def add(self, rows: slice, of_logits: Tensor) -> None:
        """Add the gradients of some rows."""
        if self.x is not None:
            torch.mm(of_logits, self.layer.weight, out=self.x[rows])
        if self.weight is not None:
            add_product(self.weight, of_logits.T, self.layer.x[rows])
        if self.bias is not None:
            self.bias.add_(of_logits.sum(0, dtype=self.bias.dtype))

    def parts(self) -> list[Tensor | None]:
        """The gradients of x, weight and bias; None if not wanted."""
        return [self.x, self.weight, self.bias]


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``; the sum may be float32 for factors of half precision."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def scaled(part: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``part * factor``, rounded once. Torch would round a factor without dimensions first."""
    return torch.mul(part, factor.view(1), out=torch.empty_like(part, dtype=dtype))


class ShardedLinearLoss(torch.autograd.Function):
    """The loss of the rows of a layer. Backward adds the gradients of x of all processes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        softcap: float | None,
        temperature: float,
        options: LossOptions,
    ) -> Tensor:
        """The loss, equal on all processes. Also computes the gradients of the sum of losses."""
        layer = LogitShard(x, weight, bias, target, class_weight, softcap, temperature, options)
        each = options.reduction == "none"
        wanted = (False,) * 3 if each else ctx.needs_input_grad[:3]
        gradients = Gradients(layer, wanted)
        one = x.new_ones((), dtype=compute_dtype(x.dtype))
        found: list[Rows] = []
        for rows in layer.chunks():
            logits = layer.logits(rows)
            numbers = numbers_of_rows(logits, target[rows], class_weight, options)
            found.append(numbers)
            if any(wanted):
                gradients.add(rows, layer.differentiate(one, rows, logits, numbers.state))
        joined = Rows(*(torch.cat(parts, -1) for parts in zip(*found, strict=True)))
        loss, divisor = reduced(joined, options)
        ctx.softcap, ctx.temperature, ctx.options = softcap, temperature, options
        ctx.save_for_backward(
            x, weight, bias, target, class_weight, joined.state, divisor, *gradients.parts()
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias."""
        saved = ctx.saved_tensors
        x, weight, bias, target, class_weight, state, divisor, of_x, of_weight, of_bias = saved
        numbers = (ctx.softcap, ctx.temperature, ctx.options)
        layer = LogitShard(x, weight, bias, target, class_weight, *numbers)
        parts: list[Tensor | None] = [of_x, of_weight, of_bias]
        factor = grad.to(state.dtype)
        if layer.options.reduction == "none":
            gradients = Gradients(layer, ctx.needs_input_grad[:3])
            for rows in layer.chunks():
                logits, of_rows = layer.logits(rows), state[:, rows].contiguous()
                gradients.add(rows, layer.differentiate(factor[rows], rows, logits, of_rows))
            parts, factor = gradients.parts(), state.new_ones(())
        elif layer.options.reduction == "mean":
            # Ignored rows have no gradient, also if no row counts and the divisor is 0.
            factor = factor / divisor.where(divisor != 0, 1)
        inputs = (layer.x, layer.weight, layer.bias)
        found = [
            None if part is None or like is None else scaled(part, factor, like.dtype)
            for part, like in zip(parts, inputs, strict=True)
        ]
        if found[0] is not None:
            dist.all_reduce(found[0], group=layer.options.shard.group)
        return (*found, None, None, None, None, None)


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    classes: int | None = None,
    first_class: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Returns :func:`torchkiln.linear_cross_entropy` of a layer whose classes are distributed.

    Each process of ``group`` has the rows of ``linear_weight`` for some adjacent classes, in the
    order of the ranks, and the whole ``x``. All processes get the same loss. Logits are computed
    for a chunk of rows at a time: as many rows as fit in 1 GiB, at least 2048 and at most 8192. The
    same pass computes the gradients of ``x`` and of the layer. Each chunk gathers four numbers per
    row and process, or five with ``weight``. Backward adds the gradients of ``x`` of all processes
    once. The gradients of weight and bias are added in float32 for half precision. There is no
    second derivative.

    ``x`` and ``target`` are equal on all processes. ``target`` counts classes over all processes;
    ``linear_weight``, ``linear_bias`` and ``weight`` hold the classes of this process. ``group``,
    ``classes`` and ``first_class`` are those of :func:`vocab_parallel_cross_entropy`, the other
    arguments those of :func:`torchkiln.linear_cross_entropy`.
    """
    check_reduction(NAME, reduction)
    check_softcap(NAME, softcap)
    check_temperature(NAME, temperature)
    check_target(NAME, target, x.shape[:-1])
    x, linear_weight, linear_bias = layer_in_autocast(x, linear_weight, linear_bias)
    fits = linear_weight.ndim == 2 and linear_weight.shape[1:] == x.shape[-1:]
    if not fits or linear_weight.dtype != x.dtype:
        found = f"{linear_weight.dtype} {list(linear_weight.shape)}"
        raise ValueError(
            f"torchkiln.{NAME}: linear_weight: got {found}, expected {x.dtype} "
            f"[classes of this process, {x.shape[-1]}]: the dtype and the last size of x"
        )
    shard = class_shard(NAME, linear_weight.shape[0], group, classes, first_class)
    dtype = dtype_of_loss(x, loss_dtype)
    options = LossOptions(shard, ignore_index, reduction, label_smoothing, z_loss, dtype)
    if weight is not None and softcap is not None:
        weight = weight.to(compute_dtype(x.dtype))
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    with torch.autocast(x.device.type, enabled=False):
        loss: Tensor = ShardedLinearLoss.apply(  # type: ignore[no-untyped-call]
            *(flat, linear_weight, linear_bias, target.reshape(-1), weight),
            *(softcap, temperature, options),
        )
    return loss.view(target.shape) if reduction == "none" else loss
