"""Calls of a batch norm, an activation and a max pool, which are one op in training."""

from __future__ import annotations

import functools

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchkiln.nn.batch_norm import batch_norm_act, is_synchronized
from torchkiln.nn.convolution import conv_norm_act, convolved, norm_act, runs_batch_norm
from torchkiln.nn.plain import is_torchs
from torchkiln.ops._pool import Pair, Windows, bn_act_pool, takes_pool
from torchkiln.typing import Activation


def norm_act_pool(
    norm: _BatchNorm,
    pool: nn.Module,
    x: Tensor,
    act: Activation,
    moments: Tensor | None = None,
    *,
    inside: bool = False,
) -> Tensor:
    """``pool(act(norm(x)))``; ``moments`` and ``inside`` as for :func:`norm_act`."""
    windows = windows_of(pool) if norm.training and moments is None else None
    is_own = runs_batch_norm(norm, inside=inside) and not is_synchronized(norm)
    if windows is not None and is_own and takes_pool(x, windows):
        return batch_norm_act(norm, x, None, act, functools.partial(bn_act_pool, windows))
    y: Tensor = pool(norm_act(norm, x, None, act, moments, inside=inside))
    return y


def conv_norm_act_pool(
    conv: nn.Module,
    norm: _BatchNorm,
    pool: nn.Module,
    x: Tensor,
    act: Activation,
    *,
    inside: bool = False,
) -> Tensor:
    """``pool(act(norm(conv(x))))``; ``inside`` as for :func:`norm_act`."""
    if norm.training:
        y, moments = convolved(conv, norm, x, inside=inside)
        return norm_act_pool(norm, pool, y, act, moments, inside=inside)
    z: Tensor = pool(conv_norm_act(conv, norm, x, None, act, inside=inside))
    return z


def is_max_pool(module: nn.Module | None) -> bool:
    """Whether a module is torch's max pool of two dimensions."""
    return module is not None and is_torchs(module, (nn.MaxPool2d,))


def windows_of(pool: nn.Module) -> Windows | None:
    """The windows of torch's max pool; None for dilation, ceil_mode or returned indices."""
    if not is_max_pool(pool) or not isinstance(pool, nn.MaxPool2d):
        return None
    if pool.ceil_mode or pool.return_indices or pair_of(pool.dilation) != (1, 1):
        return None
    kernel, padding = pair_of(pool.kernel_size), pair_of(pool.padding)
    return Windows(kernel, pair_of(pool.stride), padding)


def pair_of(size: int | tuple[int, ...]) -> Pair:
    """The sizes in two dimensions."""
    return (size, size) if isinstance(size, int) else (size[0], size[-1])
