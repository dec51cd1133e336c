"""Dropout of distributed tensors: shards draw different numbers, copies draw equal numbers.

All processes need equal seeds, as for the random ops of torch on a ``DTensor``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

APART = 0x9E3779B97F4A7C15
"""The difference between the seeds of two adjacent shards: 2**64 divided by the golden ratio."""


def index_of_shard(x: DTensor) -> int:
    """The index of this process's shard of ``x``, over the mesh dimensions that shard ``x``."""
    index, mesh = 0, x.device_mesh
    for dim, placement in enumerate(x.placements):
        if placement.is_shard():
            index = index * mesh.size(dim) + mesh.get_local_rank(dim)
    return index


def shifted(state: Any, index: int) -> Any:
    """The state of a shard: the seed plus ``index * APART``, unchanged for the first shard."""
    if index:
        by = index * APART % 2**64
        state[0].add_(by - 2**64 if by >= 2**63 else by)
    return state


def distributed(state: Any, x: DTensor) -> DTensor:
    """States ``[..., 2]`` with the shards of ``x``, and one state per shard in each dimension."""
    mesh = x.device_mesh
    placements = [p if isinstance(p, Shard) else Replicate() for p in x.placements]
    shape = [1] * x.ndim + [2]
    own = state.view(shape)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.size(dim)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        own, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def dropout_state(op: Any, args: tuple[Any, ...], _: dict[str, Any]) -> DTensor:
    """Draw a state for each shard."""
    (x,) = args
    state = op(x.to_local())
    return distributed(shifted(state, index_of_shard(x)), x)


def dropped(x: Any, bias: Any, residual: Any, p: float, training: bool) -> Any:
    """The op as two ops, of which the first draws the state."""
    ops = torch.ops.torchkiln
    state = None
    if training and p > 0:
        state = ops._dropout_state.default(x)
    return ops._dropout_add_with_state.default(x, bias, residual, state, p)


def dropout_add(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torchkiln.dropout_add of distributed tensors."""

    def call(x: Any, residual: Any, p: float = 0.5, training: bool = True) -> Any:
        return dropped(x, None, residual, p, training)

    return call(*args, **kwargs)


def bias_dropout_add(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torchkiln.bias_dropout_add of distributed tensors."""

    def call(x: Any, bias: Any, residual: Any, p: float = 0.5, training: bool = True) -> Any:
        return dropped(x, bias, residual, p, training)

    return call(*args, **kwargs)


HANDLERS = {
    "bias_dropout_add": bias_dropout_add,
    "dropout_add": dropout_add,
    "_dropout_state": dropout_state,
}
"""The function of each op by name, in the form of torch's handlers for DTensor."""
