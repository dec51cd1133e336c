"""cuDNN's graphs of the norms, through nvidia-cudnn-frontend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from torchkiln.bench.case import BenchCase, Function
from torchkiln.bench.peers.cudnn_graph import (
    DTYPES,
    PACKAGE,
    Builder,
    Call,
    Described,
    Graph,
    Runner,
    described,
    is_recorded,
    number,
    recorded,
    zeros_like,
)
from torchkiln.bench.peers.package import Refused, epsilon, require_last, require_package

LAYOUT = torch.channels_last


def columns(t: Tensor) -> Tensor:
    """A vector as a tensor of four dimensions, along the second dimension."""
    return t.view(1, -1, 1, 1)


def vector(count: int) -> Described:
    """A float32 vector of statistics, one number for each row."""
    return torch.float32, (count, 1, 1, 1), (1, 1, 1, 1)


def channel_vector(count: int) -> Described:
    """A float32 vector of statistics, one number for each channel."""
    return torch.float32, (1, count, 1, 1), (count, 1, 1, 1)


@cache
def norm_forward(x: Described, weight: Described, *, centered: bool) -> Graph:
    """Layer norm or RMS norm of rows, with the statistics that backward reads."""
    build = Builder(x[0])
    call: dict[str, Any] = {
        "name": "norm",
        "norm_forward_phase": build.cudnn.norm_forward_phase.TRAINING,
        "input": build.reads("x", x),
        "scale": build.reads("weight", weight),
    }
    mean = None
    if centered:
        call["bias"] = build.reads("bias", weight)
        call["epsilon"] = build.reads_number("eps")
        y, mean, rstd = build.graph.layernorm(**call)
    else:
        call["epsilon"] = build.reads_number("eps")
        y, rstd = build.graph.rmsnorm(**call)
    build.writes("y", y, x)
    build.writes("rstd", rstd, vector(x[1][0]))
    if mean is not None:
        build.writes("mean", mean, vector(x[1][0]))
    return build.build()


@cache
def norm_backward(x: Described, weight: Described, *, centered: bool) -> Graph:
    """Gradients of the rows and the parameters."""
    build = Builder(x[0])
    call: dict[str, Any] = {
        "name": "norm_backward",
        "grad": build.reads("grad", x),
        "input": build.reads("x", x),
        "scale": build.reads("weight", weight),
        "inv_variance": build.reads("rstd", vector(x[1][0])),
    }
    if centered:
        call["mean"] = build.reads("mean", vector(x[1][0]))
        grad_x, grad_weight, grad_bias = build.graph.layernorm_backward(**call)
    else:
        grad_x, grad_weight, grad_bias = build.graph.rmsnorm_backward(**call, has_dbias=False)
    build.writes("grad_x", grad_x, x)
    build.writes("grad_weight", grad_weight, weight)
    if centered:
        build.writes("grad_bias", grad_bias, weight)
    return build.build()


@cache
def batch_norm_forward(x: Described, weight: Described, *, residual: bool, signs: bool) -> Graph:
    """Batch norm with the statistics of the batch, residual sum and relu.

    With ``signs`` the graph also returns whether each result is positive, which backward with a
    residual reads.
    """
    build, channels = Builder(x[0]), channel_vector(x[1][1])
    y, mean, rstd, next_mean, next_var = build.graph.batchnorm(
        name="norm",
        input=build.reads("x", x),
        scale=build.reads("weight", weight),
        bias=build.reads("bias", weight),
        in_running_mean=build.reads("running_mean", channels),
        in_running_var=build.reads("running_var", channels),
        epsilon=build.reads_number("eps"),
        momentum=build.reads_number("momentum"),
    )
    if residual:
        y = build.graph.add(y, build.reads("residual", x), name="sum")
    y = build.graph.relu(name="relu", input=y)
    build.writes("y", y, x)
    outputs = {"mean": mean, "rstd": rstd, "next_mean": next_mean, "next_var": next_var}
    for name, output in outputs.items():
        build.writes(name, output, channels)
    if signs:
        zeros = build.reads("zeros", x)
        positive = build.graph.cmp_gt(name="positive", input=y, comparison=zeros)
        build.writes("positive", positive, (torch.bool, *x[1:]))
    return build.build()


@cache
def batch_norm_backward(x: Described, weight: Described, *, residual: bool) -> Graph:
    """Gradients of x and the parameters, and of the residual if there is one.

    Without a residual the sign of the result is computed again from x.
    """
    build = Builder(x[0])
    rows, scale = build.reads("x", x), build.reads("weight", weight)
    statistics = {
        "mean": build.reads("mean", channel_vector(x[1][1])),
        "inv_variance": build.reads("rstd", channel_vector(x[1][1])),
    }
    grad = build.reads("grad", x)
    if residual:
        positive = build.reads("positive", (torch.bool, *x[1:]))
        grad = build.graph.scale(name="relu_backward", input=grad, scale=positive)
        build.writes("grad_residual", grad, x)
    else:
        bias = build.reads("bias", weight)
        y = build.graph.batchnorm_inference(input=rows, scale=scale, bias=bias, **statistics)
        grad = build.graph.relu_backward(loss=grad, input=y)
        grad.set_data_type(build.type_of(x[0]))
    grad_x, grad_weight, grad_bias = build.graph.batchnorm_backward(
        name="norm_backward", grad=grad, input=rows, scale=scale, **statistics
    )
    build.writes("grad_x", grad_x, x)
    build.writes("grad_weight", grad_weight, weight)
    build.writes("grad_bias", grad_bias, weight)
    return build.build()


def require_dtype(x: Tensor) -> None:
    """Refuse dtypes that cuDNN's norms do not support, and empty tensors."""
    if x.dtype not in DTYPES:
        raise Refused("supports float32, float16 and bfloat16")
    if x.numel() == 0:
        raise Refused("needs at least 1 row and 1 column")


def norm(
    runner: Runner,
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool,
) -> Tensor:
    """Layer norm or RMS norm of the last dimension."""
    require_last(normalized_shape)
    require_dtype(x)
    if weight is None or (centered and bias is None):
        raise Refused("needs weight and bias" if centered else "needs a weight")
    if not x.is_contiguous():
        raise Refused("supports contiguous rows only")
    length = x.shape[-1]
    # Each row becomes the channels of an image of one pixel.
    sizes, strides = (x.numel() // length, length, 1, 1), (length, 1, length, length)
    given = {"x": x.view(sizes), "weight": columns(weight)}
    if bias is not None:
        given["bias"] = columns(bias)
    key = (x.dtype, sizes, strides), described(given["weight"])
    backward = norm_backward(*key, centered=centered) if is_recorded(given.values()) else None
    forward = norm_forward(*key, centered=centered)
    call = Call(runner, forward, backward, {"eps": number(eps)})
    return recorded(call, given).view(x.shape)


def layer_norm(
    runner: Runner,
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm with weight and bias."""
    return norm(runner, x, normalized_shape, weight, bias, eps, centered=True)


def rms_norm(
    runner: Runner,
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
) -> Tensor:
    """RMS norm with a weight and no bias."""
    if offset != 0:
        raise Refused("has no offset")
    return norm(runner, x, normalized_shape, weight, None, epsilon(x, eps), centered=False)


def bn_act(
    runner: Runner,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    act: str = "relu",
    training: bool = False,
    eps: float = 1e-5,
) -> Tensor:
    """Batch norm, residual sum and relu in training; its running statistics are not used."""
    require_dtype(x)
    if not training:
        raise Refused("has no eval mode, because it takes 1 / deviation instead of the variance")
    if running_mean is not None or running_var is not None:
        raise Refused("is called without running statistics")
    if act != "relu":
        raise Refused("has relu only")
    if weight is None or bias is None:
        raise Refused("needs weight and bias")
    images = [x] if residual is None else [x, residual]
    if not all(t.dim() == 4 and t.is_contiguous(memory_format=LAYOUT) for t in images):
        raise Refused("supports images in channels_last only")
    given = {"x": x, "weight": columns(weight), "bias": columns(bias)}
    running = torch.zeros(1, x.shape[1], 1, 1, device=x.device)  # required by the binding
    constants = {"eps": number(eps), "momentum": number(0.1)}
    constants |= {"running_mean": running, "running_var": running}
    if residual is not None:
        given["residual"] = residual
    key = described(x), described(given["weight"])
    has_residual, backward = residual is not None, None
    if is_recorded(given.values()):
        backward = batch_norm_backward(*key, residual=has_residual)
        if has_residual:
            constants["zeros"] = zeros_like(x.device, *described(x))
    forward = batch_norm_forward(*key, residual=has_residual, signs="zeros" in constants)
    return recorded(Call(runner, forward, backward, constants), given)


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "bn_act": bn_act,
}


def function_of(case: BenchCase) -> Function:
    """The function for the op of ``case``, which owns the workspaces of its graphs."""
    require_package(case, PACKAGE)
    return partial(FUNCTIONS[case.spec.name], Runner())
