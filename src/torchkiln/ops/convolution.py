"""Convolution, batch norm, residual sum and activation."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from torchkiln.ops._conv_moments import bn_act_from, conv_with_moments
from torchkiln.ops._conv_routes import ACTS, CONVOLUTIONS, Sizes, geometry_of, run_folded
from torchkiln.ops._folding import Parts, forget
from torchkiln.ops._traced import name_of
from torchkiln.ops.batch_norm import bn_act
from torchkiln.ops.eager import is_foreign
from torchkiln.typing import Activation


def conv_bn_act(
    x: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    stride: int | Sizes = 1,
    padding: int | Sizes | str = 0,
    dilation: int | Sizes = 1,
    groups: int = 1,
    act: Activation = "relu",
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Returns ``act(batch_norm(conv(x)) + residual)``.

    In training, and wherever a gradient is needed, this is torch's convolution followed by
    :func:`bn_act`. On a GPU of compute capability 9.0, a large convolution of one element, in half
    precision and with adjacent channels, computes the statistics in the same kernel. In eval mode
    without gradients the batch norm is folded once, in float32, into weight and bias of the
    convolution. The fold is kept until a parameter or a statistic changes. On a GPU cuDNN then
    computes bias, sum and relu in the convolution. For other activations a matrix product computes
    kernels of one element. On a CPU, sum and activation are in place. :func:`explain` reports the
    choice and the reason.

    The weight is folded only if it is a ``torch.nn.Parameter``. Torch does not count in-place
    changes through ``.data``: change parameters under ``torch.no_grad()`` instead, or call the
    function once with gradients. ``torch.compile``, ``torch.export`` and CUDA graphs contain the
    convolution and ``bn_act``, which read the parameters.

    Args:
        x: ``[batch, in_channels, ...]`` with 1 to 3 dimensions ``...``; float32, float64, float16
            or bfloat16.
        conv_weight: ``[out_channels, in_channels / groups, ...]``; of the dtype of ``x``.
        conv_bias: ``[out_channels]``; of the dtype of ``x``.
        bn_weight: ``[out_channels]``; of the dtype of the convolution, or float32 if that is half
            precision. The dtype of the next three arguments is the same.
        bn_bias: ``[out_channels]``.
        running_mean: ``[out_channels]``; None only in training.
        running_var: ``[out_channels]``; None only in training.
        residual: of the shape and dtype of the convolution.
        stride: a number, or one for each dimension; so are padding and dilation.
        padding: zeros on both sides, or ``"same"`` or ``"valid"``.
        dilation: the distance of the elements of the kernel.
        groups: number of channel groups that are convolved separately.
        act: an activation, or none.
        training: whether to use the statistics of this batch, and to move the running ones.
        momentum: the weight of the new statistics.
        eps: a number of at least 0.
    """
    if not isinstance(x, Tensor) and is_foreign(x):  # type: ignore[unreachable]
        return handle_torch_function(  # type: ignore[unreachable]
            conv_bn_act, (x,), **locals()
        )
    if act not in ACTS:
        raise ValueError(
            f"torchkiln.conv_bn_act: act: got {act!r}, expected one of {', '.join(ACTS)}"
        )
    check_ranks(x, conv_weight)
    if running_mean is None or running_var is None:
        check_running(running_mean, running_var, training=training)
    if training:
        forget(conv_weight)
    elif running_mean is not None and running_var is not None and not is_compiling():
        parts = Parts(conv_weight, conv_bias, bn_weight, bn_bias, running_mean, running_var)
        geometry = geometry_of(conv_weight, stride, padding, dilation, groups)
        found = run_folded(conv_weight, x, parts, residual, geometry, act=act, eps=eps)
        if found is not None:
            return found
    known: tuple[Tensor, Tensor] | None = None
    norm: Callable[..., Tensor] = bn_act
    if training:
        geometry = geometry_of(conv_weight, stride, padding, dilation, groups)
        known = conv_with_moments(x, conv_weight, conv_bias, geometry)
    if known is not None:
        y, norm = known[0], functools.partial(bn_act_from, known[1])
    else:
        convolution = CONVOLUTIONS[x.dim()]
        y = convolution(x, conv_weight, conv_bias, stride, padding, dilation, groups)
    check_vectors(y, bn_weight, bn_bias, running_mean, running_var)
    if residual is not None:
        check_residual(y, residual)
    return norm(
        y,
        bn_weight,
        bn_bias,
        running_mean,
        running_var,
        residual,
        act=act,
        training=training,
        momentum=momentum,
        eps=eps,
    )


def check_ranks(x: Tensor, weight: Tensor) -> None:
    """Refuses an ``x`` without 3 to 5 dimensions, and a weight of another rank."""
    if x.dim() not in CONVOLUTIONS:
        raise ValueError(
            f"torchkiln.conv_bn_act: x: got shape {list(x.shape)}, expected [batch, channels, ...] "
            "with 3 to 5 dimensions"
        )
    if weight.dim() != x.dim():
        raise ValueError(
            f"torchkiln.conv_bn_act: conv_weight: got shape {list(weight.shape)}, expected "
            f"{x.dim()} dimensions, as x has"
        )


def check_running(mean: Tensor | None, var: Tensor | None, *, training: bool) -> None:
    """Refuses one running statistic without the other, and eval mode without both."""
    if training and mean is None and var is None:
        return
    name = "running_mean" if mean is None else "running_var"
    wanted = "a tensor, as the other statistic is one" if training else "a tensor in eval mode"
    raise ValueError(f"torchkiln.conv_bn_act: {name}: got None, expected {wanted}")


def check_vectors(
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
) -> None:
    """Refuses vectors of another length than the channels of the convolution."""
    named = {"bn_weight": weight, "bn_bias": bias, "running_mean": mean, "running_var": var}
    for name, vector in named.items():
        if vector is not None and vector.shape != y.shape[1:2]:
            raise ValueError(
                f"torchkiln.conv_bn_act: {name}: got shape {list(vector.shape)}, expected "
                f"[{y.shape[1]}], the channels of the convolution"
            )


def check_residual(y: Tensor, residual: Tensor) -> None:
    """Refuses a residual of another shape or dtype than the convolution."""
    if residual.shape != y.shape:
        raise ValueError(
            f"torchkiln.conv_bn_act: residual: got shape {list(residual.shape)}, expected "
            f"{list(y.shape)}, the shape of the convolution"
        )
    if residual.dtype != y.dtype:
        raise ValueError(
            f"torchkiln.conv_bn_act: residual: got dtype {name_of(residual.dtype)}, expected "
            f"{name_of(y.dtype)}, the dtype of the convolution"
        )
