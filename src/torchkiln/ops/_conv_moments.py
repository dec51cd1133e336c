"""Convolutions whose kernel also computes the moments of its results, for the next batch norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from torchkiln import _C
from torchkiln.ops._conv_routes import HALF, Geometry, dtype_of
from torchkiln.ops._folding import PLAIN, is_transformed
from torchkiln.typing import Activation

Vector = Tensor | None


def conv_with_moments(
    x: Tensor, weight: Tensor, bias: Vector, geometry: Geometry
) -> tuple[Tensor, Tensor] | None:
    """The convolution and the moments of its channels; None if torch's convolution is to run.

    The kernel needs filters of one element, adjacent channels, half precision and a GPU of compute
    capability 9.0. It runs if, by the sizes of x, it takes less time than torch's convolution plus
    a pass over the results. Not under torch.compile, where sizes are not final.
    """
    if not x.is_cuda or bias is not None or not is_pixelwise(weight, geometry):
        return None
    dtype = dtype_of(x, weight)
    if x.dtype != dtype or dtype not in HALF or x.dim() != weight.dim() or is_compiling():
        return None
    if is_transformed() or type(x) not in PLAIN or type(weight) not in PLAIN:
        return None
    # if they do not agree, torch raises an error
    agree = weight.shape[1] == x.shape[1] and weight.device == x.device
    ops = torch.ops.torchkiln
    if not agree or not ops._pixel_conv_gains.default(x, weight.shape[0]):
        return None
    _C.note("1x1 convolution as a matrix product that computes the moments of its results")
    y, moments = ops._pixel_conv.default(x, weight.to(dtype))
    return y, moments


def is_pixelwise(weight: Tensor, geometry: Geometry) -> bool:
    """Whether each output pixel is the product of one input pixel and the filters."""
    stride, padding, _, groups = geometry
    has_padding = not isinstance(padding, str) and any(padding)
    ones = all(size == 1 for size in (*weight.shape[2:], *stride))
    return ones and not has_padding and groups == 1


def bn_act_from(
    moments: Tensor,
    x: Tensor,
    weight: Vector,
    bias: Vector,
    running_mean: Vector,
    running_var: Vector,
    residual: Vector,
    *,
    act: Activation,
    training: bool,  # noqa: ARG001
    momentum: float,
    eps: float,
) -> Tensor:
    """:func:`torchkiln.bn_act` in training, from the computed ``moments`` of ``x``."""
    parts = weight, bias, running_mean, running_var, residual
    op = torch.ops.torchkiln._bn_act_from_moments.default
    y: Tensor = op(x, moments[None], *parts, act, momentum, eps)
    return y
