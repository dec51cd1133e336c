"""The ways to run an op on shards, along one dimension of a mesh, without communication.

Each function yields the choices for a family of ops. ``call`` has the arguments of the op as
attributes; tensors have a shape and no values. ``Partial`` marks a part of a sum over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchkiln.ops.activation import ACTIVATIONS, IN_PLACE

Choice = tuple[Sequence[Placement], Mapping[str, Placement]]
"""The placements of the results, and of the arguments by name; other arguments are replicated."""

Choices = Iterator[Choice]
Call = SimpleNamespace


def rank(tensor: Any) -> int:
    """The number of dimensions."""
    return len(tensor.shape)


def aligned(tensor: Any, dim: int, like: Any) -> Placement | None:
    """The shard of a tensor that is broadcast to ``like``, which is sharded in ``dim``."""
    own = dim - rank(like) + rank(tensor)
    return Shard(own) if own >= 0 and tensor.shape[own] == like.shape[dim] else None


def placed(like: Any, dim: int, **tensors: Any) -> dict[str, Placement]:
    """The shards of the tensors that have the dimension ``dim`` of ``like``."""
    found = {name: aligned(x, dim, like) for name, x in tensors.items() if x is not None}
    return {name: placement for name, placement in found.items() if placement is not None}


def elementwise(call: Call, *names: str) -> Choices:
    """Shards along each dimension of the broadcast shape of these arguments."""
    tensors = {name: getattr(call, name) for name in names}
    largest = max(tensors.values(), key=lambda x: (rank(x), tuple(x.shape)))
    sizes = [
        max(x.shape[d - rank(largest)] for x in tensors.values() if rank(x) >= rank(largest) - d)
        for d in range(rank(largest))
    ]
    shape = SimpleNamespace(shape=sizes)
    for dim in range(rank(shape)):
        yield [Shard(dim)], placed(shape, dim, **tensors)


def unary(call: Call) -> Choices:
    """Shards along each dimension of one tensor ``x``."""
    yield from elementwise(call, "x")


def add(call: Call) -> Choices:
    """Shards along each dimension; also parts, because a sum of parts is a part of the sum."""
    yield from elementwise(call, "a", "b")
    yield [Partial()], {"a": Partial(), "b": Partial()}


def muladd(call: Call) -> Choices:
    """Shards along each dimension; also parts: the result is linear in a and c together."""
    yield from elementwise(call, "a", "b", "c")
    yield [Partial()], {"a": Partial(), "c": Partial()}


def activation_backward(call: Call) -> Choices:
    """Shards along each dimension; also parts: the result is linear in the incoming gradient."""
    yield from elementwise(call, "grad", "saved")
    yield [Partial()], {"grad": Partial()}


def gated(call: Call) -> Choices:
    """Shards of gate and up, but not in the last dimension of a packed gate, which holds both."""
    last = 1 if call.up is None else 0
    for dim in range(rank(call.gate) - last):
        yield [Shard(dim)], placed(call.gate, dim, gate=call.gate, up=call.up)


def gated_backward(call: Call) -> Choices:
    """The choices of :func:`gated`; the results are the gradients of gate and up."""
    for outputs, inputs in gated(call):
        yield [*outputs, *outputs], {**inputs, "grad": outputs[0]}


def gated_backward_with_output(call: Call) -> Choices:
    """Shards in all but the last dimension; the results are a packed gate's gradient and output."""
    for dim in range(rank(call.packed) - 1):
        yield [Shard(dim), Shard(dim)], {"grad": Shard(dim), "packed": Shard(dim)}


def bias_act(call: Call) -> Choices:
    """Shards along each dimension, with a bias along the last; parts if there is no activation."""
    for dim in range(rank(call.x)):
        yield [Shard(dim)], placed(call.x, dim, x=call.x, bias=call.bias)
    if call.act == "none":
        yield [Partial()], {"x": Partial(), "bias": Partial()}


def bias_act_forward(call: Call) -> Choices:
    """Shards along each dimension, but none for relu, whose saved bits have no such dimensions."""
    if call.act != "relu":
        for dim in range(rank(call.x)):
            yield [Shard(dim), Replicate()], placed(call.x, dim, x=call.x, bias=call.bias)


def bias_act_backward(call: Call) -> Choices:
    """Shards along each dimension; the gradient of the bias is a sum over all but the last.

    No choice if the saved tensor is the packed bits of relu.
    """
    if tuple(call.saved.shape) != tuple(call.grad.shape):
        return
    last = rank(call.grad) - 1
    for dim in range(rank(call.grad)):
        tensors = placed(call.grad, dim, grad=call.grad, saved=call.saved, bias=call.bias)
        yield [Shard(dim), Shard(0) if dim == last else Partial()], tensors


def norm(call: Call) -> Choices:
    """Shards of rows; the normalized dimensions are not sharded."""
    for dim in range(rank(call.x) - len(call.normalized_shape)):
        yield [Shard(dim)], {"x": Shard(dim)}


def add_norm(call: Call) -> Choices:
    """Shards of rows; the results are the norm and the sum."""
    for dim in range(rank(call.x) - len(call.normalized_shape)):
        yield [Shard(dim), Shard(dim)], {"x": Shard(dim), "residual": Shard(dim)}


def with_statistics(rows: Callable[[Call], Choices]) -> Callable[[Call], Choices]:
    """The choices for an op that also returns statistics ``[1 or 2, *rows]``."""

    def choices(call: Call) -> Choices:
        for outputs, inputs in rows(call):
            yield [*outputs, next_dim(outputs[0])], inputs

    return choices


def norm_backward(call: Call) -> Choices:
    """Shards of rows, over which the gradients of weight and bias are sums."""
    for dim in range(rank(call.stats) - 1):
        inputs = {name: Shard(dim) for name in ("grad", "grad_sum", "z")}
        yield [Shard(dim), Partial(), Partial()], {**inputs, "stats": Shard(dim + 1)}


def gated_norm(call: Call) -> Choices:
    """Shards of rows of x and gate; the normalized dimensions are not sharded."""
    for dim in range(rank(call.x) - len(call.normalized_shape)):
        yield [Shard(dim)], {"x": Shard(dim), "gate": Shard(dim)}


def gated_norm_forward(call: Call) -> Choices:
    """Shards of rows; the results are the norm and rstd [*rows, groups]."""
    for outputs, inputs in gated_norm(call):
        yield [*outputs, *outputs], inputs


def gated_norm_backward(call: Call) -> Choices:
    """Shards of rows, over which the gradient of the weight is a sum."""
    for dim in range(rank(call.rstd) - 1):
        inputs = {name: Shard(dim) for name in ("grad", "x", "gate", "rstd")}
        yield [Shard(dim), Shard(dim), Partial()], inputs


def next_dim(placement: Placement) -> Placement:
    """The shard of a tensor with one more dimension in front."""
    assert isinstance(placement, Shard)
    return Shard(placement.dim + 1)


def linear(call: Call) -> Choices:
    """Shards of rows, of result columns and, without an activation, of the summed dimension."""
    last = rank(call.x) - 1
    for dim in range(last):
        yield [Shard(dim)], {"x": Shard(dim), "residual": Shard(dim)}
    if rank(call.weight) == 2:
        by_column: dict[str, Placement] = {
            "weight": Shard(0),
            "bias": Shard(0),
            "residual": Shard(last),
        }
        yield [Shard(last)], by_column
        if call.act == "none":
            parts = {"bias": Partial(), "residual": Partial()}
            yield [Partial()], {"x": Shard(last), "weight": Shard(1), **parts}


def linear_forward(call: Call) -> Choices:
    """The choices of :func:`linear`; the results are the output and the activation's argument.

    The argument is saved for backward; relu without a residual saves none.
    """
    saves = call.act != "none" and (call.act != "relu" or call.residual is not None)
    for outputs, inputs in linear(call):
        yield [*outputs, outputs[0] if saves else Replicate()], inputs


def gated_mlp(call: Call) -> Choices:
    """Shards of rows and of result columns; not of hidden features: gate and up are packed."""
    last = rank(call.x) - 1
    for dim in range(last):
        yield [Shard(dim)], {"x": Shard(dim)}
    yield [Shard(last)], {"down_weight": Shard(0), "down_bias": Shard(0)}


def mlp(call: Call) -> Choices:
    """The choices of :func:`gated_mlp`, and shards of hidden features, whose results are parts."""
    yield from gated_mlp(call)
    hidden: dict[str, Placement] = {"up_weight": Shard(0), "up_bias": Shard(0)}
    yield [Partial()], {**hidden, "down_weight": Shard(1), "down_bias": Partial()}


def softmax(call: Call, name: str = "x") -> Choices:
    """Shards in all dimensions but the summed one and, with a causal mask, the last two."""
    x = getattr(call, name)
    summed = call.dim % max(rank(x), 1)
    causal = {rank(x) - 2, rank(x) - 1} if call.causal else set()
    for dim in range(rank(x)):
        if dim != summed and dim not in causal:
            yield [Shard(dim)], placed(x, dim, **{name: x}, mask=call.mask)


def softmax_backward(call: Call) -> Choices:
    """The choices of :func:`softmax`, for its result and the incoming gradient."""
    for outputs, inputs in softmax(call, "y"):
        yield outputs, {**inputs, "grad": outputs[0]}


def cross_entropy(call: Call) -> Choices:
    """Shards of rows, for losses per row or their sum. The mean needs the weight of all rows."""
    if call.reduction == "mean" or rank(call.logits) == 1:
        return
    has_classes = rank(call.target) == rank(call.logits)
    for dim in range(rank(call.logits)):
        if dim == 1:
            continue
        row_dim = Shard(dim - (dim > 1))
        target = Shard(dim) if has_classes else row_dim
        result = row_dim if call.reduction == "none" else Partial()
        yield [result], {"logits": Shard(dim), "target": target}


def dropout_with_state(call: Call) -> Choices:
    """Without a state, shards in all dimensions; with a state, only those that it was drawn for.

    A state ``[..., 2]`` has a size above 1 in each sharded dimension.
    """
    tensors = {"x": call.x, "bias": call.bias, "residual": call.residual}
    for dim in range(rank(call.x)):
        if call.state is None:
            yield [Shard(dim)], placed(call.x, dim, **tensors)
        elif rank(call.state) > rank(call.x) and call.state.shape[dim] > 1:
            yield [Shard(dim)], {**placed(call.x, dim, **tensors), "state": Shard(dim)}


def dropout_backward(call: Call) -> Choices:
    """Shards for which the state was drawn; the gradient of the bias is summed over rows."""
    last = rank(call.grad) - 1
    for dim in range(min(rank(call.grad), rank(call.state) - 1)):
        if call.state.shape[dim] > 1:
            inputs: dict[str, Placement] = {"grad": Shard(dim), "state": Shard(dim)}
            yield [Shard(dim), Shard(0) if dim == last else Partial()], inputs


def rope(call: Call) -> Choices:
    """Shards of batches, tokens and heads."""
    dims = rank(call.q)
    heads = call.heads_dim % dims
    tokens = ({dims - 3, dims - 2} - {heads}).pop()
    angles = (call.cos, call.sin)
    for dim in range(dims - 1):
        given: dict[str, Placement] = {"q": Shard(dim), "k": Shard(dim)}
        if dim != heads:
            from_end = 2 if dim == tokens else 3
            given |= angle_shards(angles, call.positions, from_end)
        yield [Shard(dim), Shard(dim) if call.k is not None else Replicate()], given


def angle_shards(angles: Sequence[Any], positions: Any, from_end: int) -> dict[str, Placement]:
    """The shards of cos, sin and positions for sharded tokens or batches.

    ``from_end`` is 2 for tokens, 3 for batches. With positions, cos and sin are tables and are not
    sharded.
    """
    if positions is not None:
        own = rank(positions) - from_end + 1
        return {"positions": Shard(own)} if own >= 0 and positions.shape[own] > 1 else {}
    own = rank(angles[0]) - from_end
    is_sharded = own >= 0 and angles[0].shape[own] > 1
    return {"cos": Shard(own), "sin": Shard(own)} if is_sharded else {}


def qkv_norm_rope(call: Call) -> Choices:
    """Shards of batches and tokens of the projection; not of heads, which share a row."""
    dims = rank(call.qkv)
    for dim in range(dims - 1):
        from_end = dims - dim
        result = Shard(dim if from_end == 3 else dim + 1)
        shards = angle_shards((call.cos, call.sin), call.positions, from_end)
        yield [result] * 3, {"qkv": Shard(dim), **shards}


def qkv_norm_rope_backward(call: Call) -> Choices:
    """Shards of batches and tokens, over which the gradients of the weights are sums."""
    for outputs, inputs in qkv_norm_rope(call):
        grads = {f"grad_{name}": outputs[0] for name in "qkv"}
        yield [inputs["qkv"], Partial(), Partial()], {**inputs, **grads}


def total(call: Call) -> Choices:
    """Shards of kept dimensions. Shards of summed ones, and parts, have parts as results."""
    dims = range(rank(call.x))
    summed = {d % rank(call.x) for d in call.dim} if call.dim and dims else set(dims)
    for dim in dims:
        if dim not in summed:
            before = 0 if call.keepdim else sum(d < dim for d in summed)
            yield [Shard(dim - before)], {"x": Shard(dim)}
    if call.dtype in (torch.float16, torch.bfloat16):  # partial sums would be rounded
        return
    for dim in summed:
        yield [Partial()], {"x": Shard(dim)}
    yield [Partial()], {"x": Partial()}


def mean(call: Call) -> Choices:
    """The choices of :func:`total`, except shards of summed dimensions: sizes may be unequal."""
    for outputs, inputs in total(call):
        if isinstance(outputs[0], Shard) or isinstance(inputs["x"], Partial):
            yield outputs, inputs


def bn_act(call: Call) -> Choices:
    """Shards of channels; in eval mode shards of all dimensions, as elements are independent."""
    whole = {name for name in ("x", "residual") if getattr(call, name) is not None}
    vectors = ("weight", "bias", "running_mean", "running_var")
    for dim in range(rank(call.x)):
        shards: dict[str, Placement] = dict.fromkeys(whole, Shard(dim))
        if dim == 1:
            given = [name for name in vectors if getattr(call, name) is not None]
            yield [Shard(dim)], shards | dict.fromkeys(given, Shard(0))
        elif not call.training:
            yield [Shard(dim)], shards


def group_norm(call: Call) -> Choices:  # noqa: ARG001
    """Shards of samples, which are independent."""
    yield [Shard(0)], {"x": Shard(0)}


def group_norm_forward(call: Call) -> Choices:  # noqa: ARG001
    """Shards of samples; the results are the output and the statistics [3, samples, groups]."""
    yield [Shard(0), Shard(1)], {"x": Shard(0)}


def group_norm_backward(call: Call) -> Choices:  # noqa: ARG001
    """Shards of samples, over which the gradients of weight and bias are sums."""
    inputs = {"grad": Shard(0), "x": Shard(0), "statistics": Shard(1)}
    yield [Shard(0), Partial(), Partial()], inputs


CHOICES = {
    **dict.fromkeys(ACTIVATIONS, unary),
    **dict.fromkeys((f"{name}_" for name in IN_PLACE), unary),
    "_activation_backward": activation_backward,
    "add": add,
    "add_layer_norm": add_norm,
    "_add_norm_forward": with_statistics(add_norm),
    "add_rms_norm": add_norm,
    "bias_act": bias_act,
    "_bias_act_backward": bias_act_backward,
    "_bias_act_forward": bias_act_forward,
    "bn_act": bn_act,
    "cross_entropy": cross_entropy,
    "_dropout_add_backward": dropout_backward,
    "_dropout_add_with_state": dropout_with_state,
    "_gated_backward": gated_backward,
    "_gated_backward_with_output": gated_backward_with_output,
    "gated_mlp": gated_mlp,
    "gated_rms_norm": gated_norm,
    "_gated_rms_norm_backward": gated_norm_backward,
    "_gated_rms_norm_forward": gated_norm_forward,
    **dict.fromkeys(("geglu", "geglu_tanh", "swiglu"), gated),
    "layer_norm": norm,
    "group_norm": group_norm,
    "_group_norm_backward": group_norm_backward,
    "_group_norm_forward": group_norm_forward,
    "linear": linear,
    "_linear_forward": linear_forward,
    "log_softmax": softmax,
    "mean": mean,
    "mlp": mlp,
    "muladd": muladd,
    "_norm_backward": norm_backward,
    "_norm_forward": with_statistics(norm),
    "qkv_norm_rope": qkv_norm_rope,
    "_qkv_norm_rope_backward": qkv_norm_rope_backward,
    "rms_norm": norm,
    "rope": rope,
    "softmax": softmax,
    "_softmax_backward": softmax_backward,
    "sum": total,
}
"""The function of each op by name."""

RANDOM = {"_dropout_state", "dropout_add", "bias_dropout_add"}
"""Ops that draw numbers: :mod:`torchkiln.distributed.dropout` runs them, without a rule."""
