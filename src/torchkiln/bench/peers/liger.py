"""Liger-Kernel, whose kernels are written in Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchkiln.bench.peers.package import Refused, Table, epsilon, require_last, require_plain

PACKAGE = "liger_kernel"

GRADIENT_IN_FORWARD = frozenset({"cross_entropy"})
"""Ops whose forward makes the gradient, and writes it over the input, where one is recorded."""

WAITING = frozenset({"cross_entropy"})
"""Ops that read numbers back from the GPU, which no CUDA graph can hold."""

# Whether backward may overwrite the incoming gradient, which everyone shares here.
CASTING, IN_PLACE = "llama", False


def gated(apply: Callable[..., Any], gate: Tensor, up: Tensor | None = None) -> Any:
    """Gate and up are two tensors."""
    if up is None:
        raise Refused("takes gate and up apart")
    return apply(gate, up)


def layer_norm(  # noqa: PLR0917 - those of the op
    apply: Callable[..., Any],
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """With both parameters."""
    require_last(normalized_shape)
    if weight is None or bias is None:
        raise Refused("asks for weight and bias")
    return apply(x, weight, bias, eps)


def rms_norm(
    apply: Callable[..., Any],
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
) -> Any:
    """Sums in float32, as everyone's."""
    require_last(normalized_shape)
    return apply(x, weight, epsilon(x, eps), offset, CASTING, IN_PLACE)


def add_rms_norm(  # noqa: PLR0917 - those of the op
    apply: Callable[..., Any],
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
) -> Any:
    """Returns the norm and the sum, as ours."""
    require_last(normalized_shape)
    if weight is None:
        raise Refused("asks for a weight")
    return apply(x, residual, weight, epsilon(x, eps), offset, CASTING, IN_PLACE)


def softmax(
    apply: Callable[..., Any],
    x: Tensor,
    dim: int,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Any:
    """Of rows as they are."""
    require_plain(x, dim, scale, mask, causal)
    return apply(x)


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
    """The loss is the first of what it returns."""
    if target.is_floating_point():
        raise Refused("takes class indices")
    return apply(logits, target, weight, ignore_index, z_loss, label_smoothing, reduction)[0]


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
}
