"""The classes of a loss, distributed over the processes of a group in contiguous shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

MAXIMUM, SUM, BELOW, MASS, WEIGHT = range(5)
"""Indices of the numbers of a row in the result of ``_cross_entropy_shard``."""

gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The function's name since torch 2.13, else its name before."""


@dataclass(frozen=True)
class ClassShard:
    """The classes that this process holds."""

    group: dist.ProcessGroup | None
    first: int
    classes: int
    """The number of classes of all processes."""


@dataclass(frozen=True)
class LossOptions:
    """The options of a loss, and the shard that it is computed from."""

    shard: ClassShard
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    dtype: torch.dtype


class Rows(NamedTuple):
    """Numbers per row over all classes, equal on all processes, in the compute dtype."""

    loss: Tensor
    state: Tensor
    """``[2, rows]``: log-sum-exp, and the softmax's factor in the gradient."""
    weight: Tensor
    """The weight of the target class; 0 if the row is ignored."""


def class_shard(
    op: str, own: int, group: dist.ProcessGroup | None, classes: int | None, first: int | None
) -> ClassShard:
    """The shard of this process, which has ``own`` classes."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if first is not None:
        if classes is None:
            raise ValueError(f"torchkiln.{op}: classes: got None beside first_class, expected both")
        return ClassShard(group, first, classes)
    if classes is None:
        return ClassShard(group, rank * own, size * own)
    step = -(-classes // size)
    first = min(rank * step, classes)
    expected = min(step, classes - first)
    if own != expected:
        raise ValueError(
            f"torchkiln.{op}: classes: got {own} of {classes} in process {rank} of {size}, "
            f"expected {expected}, as torch.chunk splits; pass first_class for other sizes"
        )
    return ClassShard(group, first, classes)


def numbers_of_rows(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions
) -> Rows:
    """The numbers of rows from ``logits`` ``[rows, classes of the shard]``; communicates once."""
    shard = options.shard
    own = torch.ops.torchkiln._cross_entropy_shard.default(
        logits,
        target,
        weight,
        options.ignore_index,
        options.label_smoothing,
        shard.first,
        shard.classes,
    )
    if weight is None:
        own = own[:WEIGHT]  # without class weights, the weight of a row follows from its target
    parts = own.new_empty(dist.get_world_size(shard.group), *own.shape)
    gather_into(parts.flatten(0, 1), own, group=shard.group)
    return join(parts, target == options.ignore_index, options.z_loss)


def join(parts: Tensor, ignored: Tensor, z_loss: float) -> Rows:
    """The numbers over all classes from the numbers of shards, ``[shards, 4 or 5, rows]``."""
    maxima, mass = parts[:, MAXIMUM], parts[:, MASS]
    is_empty = parts[:, SUM] == 0  # all logits of a shard are -infinity
    maximum = maxima.masked_fill(is_empty, -torch.inf).amax(0)
    distance = (maxima - maximum).masked_fill(is_empty, 0)
    log_sum = (parts[:, SUM] * distance.exp()).sum(0).log()
    log_sum_exp = maximum + log_sum
    if parts.shape[1] > WEIGHT:
        weight = parts[:, WEIGHT].sum(0).masked_fill(ignored, 0)
    else:
        weight = ignored.logical_not().to(parts.dtype)
    # The loss of a row is the sum over its classes of q * (log_sum_exp - logits), with the target
    # distribution q. For each shard, mass is the sum of q, and BELOW is the sum of q * (logits -
    # maximum).
    loss = (mass * (log_sum - distance) - parts[:, BELOW]).sum(0)
    factor = mass.sum(0)
    if z_loss:
        loss = loss + z_loss * weight * log_sum_exp.square()
        factor = factor + 2 * z_loss * weight * log_sum_exp
    # The kernel subtracts the rounded log_sum_exp; the factor corrects for the rounding.
    rounding = (maximum - log_sum_exp) + log_sum
    factor = factor * torch.where(rounding.isfinite(), (-rounding).exp(), 1)
    return Rows(loss.masked_fill(ignored, 0), torch.stack([log_sum_exp, factor]), weight)


def gradient_of_logits(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    state: Tensor,
    options: LossOptions,
) -> Tensor:
    """The gradient of the shard's logits; ``grad`` has one number per row, or one for all rows."""
    shard = options.shard
    found: Tensor = torch.ops.torchkiln._cross_entropy_shard_backward.default(
        grad,
        logits,
        target,
        weight,
        state,
        options.ignore_index,
        options.label_smoothing,
        shard.first,
        shard.classes,
    )
    return found


def reduced(rows: Rows, options: LossOptions) -> tuple[Tensor, Tensor]:
    """The loss, and the divisor of its gradient."""
    one = rows.loss.new_ones(())
    if options.reduction == "none":
        return rows.loss.to(options.dtype), one
    total = rows.loss.sum()
    if options.reduction == "sum":
        return total.to(options.dtype), one
    divisor = rows.weight.sum()
    return (total / divisor).to(options.dtype), divisor


def check_reduction(op: str, reduction: str) -> None:
    """Refuses a reduction other than none, mean and sum."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(
            f"torchkiln.{op}: reduction: got {reduction!r}, expected one of none, mean, sum"
        )


def check_target(op: str, target: Tensor, shape: torch.Size) -> None:
    """Refuses a target that is not a class for each row."""
    if target.dtype != torch.int64 or target.shape != shape:
        raise ValueError(
            f"torchkiln.{op}: target: got {target.dtype} {list(target.shape)}, expected "
            f"torch.int64 {list(shape)}: a class, counted over all shards, for each row"
        )


def dtype_of_loss(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """``dtype``, by default that of ``x``, or float32 for half precision under autocast."""
    if dtype is not None:
        return dtype
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if is_half and torch.is_autocast_enabled(x.device.type) else x.dtype


def local_of(tensor: Any) -> Any:
    """The tensor of this process, if it is distributed. Its gradient has the same placements."""
    is_distributed = isinstance(tensor, DTensor)
    return tensor.to_local(grad_placements=tensor.placements) if is_distributed else tensor


def layer_in_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The tensors of a linear layer, cast as autocast casts them; a bias may stay float32."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    to = torch.get_autocast_dtype(x.device.type)
    if bias is not None and bias.dtype != torch.float32:
        bias = bias.to(to)
    return x.to(to), weight.to(to), bias


def shard_of_distributed(op: str, tensor: DTensor, dim: int) -> ClassShard:
    """The shard of a tensor that one mesh dimension shards along ``dim``, the classes."""
    dim %= tensor.ndim
    sharded = [i for i, p in enumerate(tensor.placements) if isinstance(p, Shard) and p.dim == dim]
    partial = any(p.is_partial() for p in tensor.placements)
    if len(sharded) != 1 or partial:
        raise ValueError(
            f"torchkiln.{op}: got a tensor with placements {tensor.placements}, expected the "
            f"classes, dimension {dim}, sharded in one dimension of the mesh and no partial sums; "
            "call redistribute()"
        )
    mesh_dim = sharded[0]
    mesh = tensor.device_mesh
    step = -(-tensor.shape[dim] // mesh.size(mesh_dim))
    first = min(mesh.get_local_rank(mesh_dim) * step, tensor.shape[dim])
    return ClassShard(mesh.get_group(mesh_dim), first, tensor.shape[dim])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the kernels compute in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def check_softcap(op: str, softcap: float | None) -> None:
    """Refuses a softcap that is not positive."""
    if softcap is not None and not softcap > 0:
        raise ValueError(
            f"torchkiln.{op}: softcap: got {softcap}, expected a number greater than 0, or None"
        )


def check_temperature(op: str, temperature: float) -> None:
    """Refuses a temperature that is no positive number."""
    is_number = isinstance(temperature, (int, float))
    if not (is_number and 0 < temperature < math.inf):
        raise ValueError(
            f"torchkiln.{op}: temperature: got {temperature!r}, expected a finite number greater "
            "than 0"
        )
