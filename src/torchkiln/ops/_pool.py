"""Batch norm in training, an activation and a max pool as one op."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from torchkiln import _C
from torchkiln.ops._conv_routes import HALF
from torchkiln.ops._folding import PLAIN, is_transformed
from torchkiln.typing import Activation

Pair = tuple[int, int]


class Windows(NamedTuple):
    """The windows of a max pool."""

    kernel: Pair
    stride: Pair
    padding: Pair


def takes_pool(x: Tensor, windows: Windows) -> bool:
    """Whether a kernel computes a batch norm of ``x`` and then this max pool.

    The kernel runs on a GPU and loads adjacent channels in vectors of 8.
    """
    if not x.is_cuda or x.dim() != 4 or x.dtype not in (torch.float32, *HALF):
        return False
    if not is_compiling() and (type(x) not in PLAIN or is_transformed()):
        return False
    if x.numel() == 0 or x.shape[1] % 8:
        return False
    sizes, (kernel, stride, padding) = x.shape[2:], windows
    rooms = [n + 2 * p - k for n, k, p in zip(sizes, kernel, padding, strict=True)]
    if min(rooms) < 0 or kernel[0] * kernel[1] > 256:
        return False
    count = x.shape[0] * (rooms[0] // stride[0] + 1) * (rooms[1] // stride[1] + 1)
    fits = max(count, x.numel() // x.shape[1]) < 2**31
    return fits and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def bn_act_pool(
    windows: Windows,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: None,  # noqa: ARG001
    *,
    act: Activation,
    training: bool,  # noqa: ARG001
    momentum: float,
    eps: float,
) -> Tensor:
    """The max pool of :func:`torchkiln.bn_act` in training, for an ``x`` that the kernel takes.

    Neither the result of the batch norm nor the gradient of that result is stored. The results
    equal those of separate calls; the gradient is rounded once.
    """
    if not is_compiling():
        _C.note("max pool in the kernel of the batch norm")
    op = torch.ops.torchkiln._bn_act_pool.default
    parts = weight, bias, running_mean, running_var
    y: Tensor = op(x, *parts, act, momentum, eps, *windows)
    return y
