"""Liger-Kernel: kernels in Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchkiln.bench.peers.package import Refused, Table, require_last, rms_norm_of, softmax_rows

PACKAGE = "liger_kernel"

GRADIENT_IN_FORWARD = frozenset({"cross_entropy"})
"""Ops whose forward, if autograd records it, overwrites the input with the gradient."""

WAITING = frozenset({"cross_entropy", "linear_cross_entropy", "linear_logprob", "linear_kl"})
"""Ops that copy numbers from the GPU to the host."""

# IN_PLACE would overwrite the incoming gradient in backward, which all peers share here.
CASTING, IN_PLACE = "llama", False


def gated(apply: Callable[..., Any], gate: Tensor, up: Tensor | None = None) -> Any:
    """Gated activation of two tensors."""
    if up is None:
        raise Refused("takes gate and up as two tensors")
    return apply(gate, up)


def layer_norm(
    apply: Callable[..., Any],
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Layer norm with weight and bias."""
    require_last(normalized_shape)
    if weight is None or bias is None:
        raise Refused("needs weight and bias")
    return apply(x, weight, bias, eps)


def rms_norm(apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """RMS norm with sums in float32."""
    return apply(*rms_norm_of(*args, **kwargs), CASTING, IN_PLACE)


def add_rms_norm(
    apply: Callable[..., Any], x: Tensor, residual: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """RMS norm of a sum; returns both."""
    _, weight, eps, offset = rms_norm_of(x, *args, **kwargs)
    if weight is None:
        raise Refused("needs a weight")
    return apply(x, residual, weight, eps, offset, CASTING, IN_PLACE)


def softmax(apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Softmax of rows."""
    return apply(softmax_rows(*args, **kwargs))


def cross_entropy(
    apply: Callable[..., Any],
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Any:
    """Cross entropy: the first result of the peer's function."""
    if target.is_floating_point():
        raise Refused("takes class indices")
    return apply(logits, target, weight, ignore_index, z_loss, label_smoothing, reduction)[0]


def linear_cross_entropy(
    apply: Callable[..., Any],
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Any:
    """Cross entropy of a layer: the first result. Sums over chunks are float32, as in our op."""
    if x.dim() != 2:
        raise Refused("takes rows as a matrix")
    layer = (x, linear_weight, target, linear_bias)
    numbers = (ignore_index, z_loss, label_smoothing, reduction)
    return apply(*layer, weight, *numbers, softcap, False, torch.float32)[0]


def linear_logprob(
    apply: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    entropy: bool = False,
) -> Any:
    """The negated loss per row, and the entropy; with ``rows`` only results of these rows.

    On an H100 in bfloat16 it needs nvidia-cutlass-dsl.
    """
    if x.dim() != 2 or bias is not None:
        raise Refused("takes rows as a matrix, and no bias")
    if rows is not None:
        x, target = x.index_select(0, rows), target.index_select(0, rows)
    found = apply(x, weight, target, 1.0, -100, 1, entropy)
    return (-found[0], found[1]) if entropy else -found


def linear_kl(
    apply: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    weight_y: Tensor,
    *,
    direction: str = "forward",
    beta: float = 0.5,
) -> Any:
    """The mean divergence over rows; its forward computes the gradients."""
    share = {"forward": 0.0, "reverse": 1.0, "js": beta}[direction]
    return apply(x, weight, y, weight_y, None, share)


FUNCTIONS: Table = {
    "swiglu": ("liger_kernel.ops.swiglu", "LigerSiLUMulFunction.apply", gated),
    "geglu_tanh": ("liger_kernel.ops.geglu", "LigerGELUMulFunction.apply", gated),
    "layer_norm": ("liger_kernel.ops.layer_norm", "LigerLayerNormFunction.apply", layer_norm),
    "rms_norm": ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction.apply", rms_norm),
    "add_rms_norm": (
        "liger_kernel.ops.fused_add_rms_norm",
        "LigerFusedAddRMSNormFunction.apply",
        add_rms_norm,
    ),
    "softmax": ("liger_kernel.ops.softmax", "LigerSoftmaxFunction.apply", softmax),
    "cross_entropy": (
        "liger_kernel.ops.cross_entropy",
        "LigerCrossEntropyFunction.apply",
        cross_entropy,
    ),
    "linear_cross_entropy": (
        "liger_kernel.ops.fused_linear_cross_entropy",
        "LigerFusedLinearCrossEntropyFunction.apply",
        linear_cross_entropy,
    ),
    "linear_logprob": (
        "liger_kernel.ops.fused_linear_scaled_cross_entropy",
        "LigerFusedLinearScaledCrossEntropyFunction.apply",
        linear_logprob,
    ),
    "linear_kl": (
        "liger_kernel.ops.fused_linear_jsd",
        "LigerFusedLinearJSDFunction.apply",
        linear_kl,
    ),
}
