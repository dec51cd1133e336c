"""The ways to run the ops of float8_e4m3fn on shards, as in :mod:`torchkiln.distributed.choices`.

A scale is shared by 128 elements, so a shard of a quantised dimension must be whole blocks.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Partial, Placement, Shard

from torchkiln.distributed.choices import (
    Call,
    Choices,
    add_norm,
    norm,
    placed,
    rank,
    with_statistics,
)

BLOCK = 128
"""Elements with one scale in float8_e4m3fn."""


def holds_blocks(tensor: Any, size: Any) -> bool:
    """Whether ``size`` elements are whole blocks on each device of a tensor's mesh.

    All dimensions of the mesh may shard them. False without a mesh: then the number of devices is
    not known.
    """
    mesh = getattr(tensor, "mesh", None)
    return mesh is not None and size % (BLOCK * mesh.size()) == 0


def rows_hold_blocks(x: Any) -> bool:
    """Whether shards of the first dimension are whole blocks of the rows of a matrix."""
    if rank(x) < 2 or not holds_blocks(x, x.shape[:-1].numel()):
        return False
    return bool(x.shape[0] % x.mesh.size() == 0)


def quantize(call: Call) -> Choices:
    """Shards in each dimension, in the last in whole blocks; results are data and scales."""
    for dim in range(rank(call.x)):
        if dim < rank(call.x) - 1 or holds_blocks(call.x, call.x.shape[-1]):
            yield [Shard(dim)] * 2, {"x": Shard(dim)}


def turned(call: Call, name: str) -> Choices:
    """Shards of columns, or of rows (dimension 0), in whole blocks; the results are transposed."""
    x = getattr(call, name)
    if rows_hold_blocks(x):
        yield [Shard(1)] * 2, {name: Shard(0)}
    if holds_blocks(x, x.shape[-1]):
        yield [Shard(0)] * 2, {name: Shard(rank(x) - 1)}


def quantize_both(call: Call) -> Choices:
    """The choices of :func:`turned`, for the results of :func:`quantize` and the transposed."""
    for outputs, inputs in turned(call, "x"):
        yield [*[inputs["x"]] * 2, *outputs], inputs


def quantize_weight(call: Call) -> Choices:
    """Shards of rows and of columns in whole blocks."""
    for outputs, inputs in turned(call, "weight"):
        yield [*[inputs["weight"]] * 2, *outputs], inputs


def transpose_quantized(call: Call) -> Choices:
    """The choices of :func:`turned`."""
    for outputs, inputs in turned(call, "data"):
        yield outputs, {**inputs, "scale": inputs["data"]}


def dequantize(call: Call) -> Choices:
    """Shards in all dimensions; in whole blocks where several elements have one scale."""
    for dim in range(rank(call.data)):
        size = call.data.shape[dim]
        has_own = dim < rank(call.data) - 1 and call.scale.shape[dim] == size
        if has_own or holds_blocks(call.data, size):
            yield [Shard(dim)], {"data": Shard(dim), "scale": Shard(dim)}


def quantized_product(call: Call) -> Choices:
    """Shards of rows and of result columns; shards of the summed dimension, which give parts."""
    last = rank(call.a) - 1
    for dim in range(last):
        yield [Shard(dim)], {"a": Shard(dim), "a_scale": Shard(dim)}
    if not call.square or holds_blocks(call.a, call.b.shape[0]):
        yield [Shard(last)], {"b": Shard(0), "b_scale": Shard(0), "bias": Shard(0)}
    if holds_blocks(call.a, call.a.shape[-1]):
        left: dict[str, Placement] = dict.fromkeys(("a", "a_scale"), Shard(last))
        yield [Partial()], {**left, "b": Shard(1), "b_scale": Shard(1), "bias": Partial()}


def linear_fp8(call: Call) -> Choices:
    """The choices of a linear layer without an activation; shards of weights are whole blocks."""
    last = rank(call.x) - 1
    for dim in range(last):
        yield [Shard(dim)], dict.fromkeys(("x", "scale", "source"), Shard(dim))
    for dim, size in enumerate(call.weight.shape):
        if not holds_blocks(call.x, size):
            continue
        weight = dict.fromkeys(("weight", "weight_data", "weight_scale"), Shard(dim))
        weight |= dict.fromkeys(("weight_transposed", "weight_transposed_scale"), Shard(1 - dim))
        if dim == 0:
            yield [Shard(last)], {**weight, "bias": Shard(0)}
        else:
            given = dict.fromkeys(("x", "scale", "source"), Shard(last))
            yield [Partial()], {**weight, **given, "bias": Partial()}


def gated_linear_fp8(call: Call) -> Choices:
    """Shards of all dimensions of x but the last; shards of weight rows would part gate from up."""
    for dim in range(rank(call.x) - 1):
        yield [Shard(dim)] * 3, dict.fromkeys(("x", "scale", "source"), Shard(dim))


def gated_fp8_backward(call: Call) -> Choices:
    """Shards of rows in the first dimension, in whole blocks; two results are transposed."""
    if rows_hold_blocks(call.packed):
        yield [Shard(0), Shard(0), Shard(1), Shard(1)], {"grad": Shard(0), "packed": Shard(0)}


def gated_fp8(call: Call) -> Choices:
    """Shards in all dimensions but the last; the results are data, scale, and a stand-in."""
    for dim in range(rank(call.gate) - 1):
        yield [Shard(dim)] * 3, placed(call.gate, dim, gate=call.gate, up=call.up)


def norm_fp8(call: Call) -> Choices:
    """Shards of rows; the results are data, scale, and the tensor that stands for the norm."""
    for outputs, inputs in norm(call):
        yield [*outputs] * 3, inputs


def add_norm_fp8(call: Call) -> Choices:
    """Shards of rows; the results are those of :func:`norm_fp8`, and the sum."""
    for outputs, inputs in add_norm(call):
        yield [*outputs, *outputs], inputs


CHOICES = {
    "add_layer_norm_fp8": add_norm_fp8,
    "_add_norm_fp8_forward": with_statistics(add_norm_fp8),
    "add_rms_norm_fp8": add_norm_fp8,
    "dequantize": dequantize,
    "_gated_fp8": gated_fp8,
    "_gated_fp8_backward": gated_fp8_backward,
    "gated_linear_fp8": gated_linear_fp8,
    "layer_norm_fp8": norm_fp8,
    "linear_fp8": linear_fp8,
    "_norm_fp8_forward": with_statistics(norm_fp8),
    "quantize": quantize,
    "quantize_both": quantize_both,
    "quantize_weight": quantize_weight,
    "_quantized_product": quantized_product,
    "rms_norm_fp8": norm_fp8,
    "transpose_quantized": transpose_quantized,
}
"""The function of each op by name."""
