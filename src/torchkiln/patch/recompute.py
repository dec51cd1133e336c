"""Calls of convolution, batch norm and activation whose results are computed again in backward.

A convolution saves its input for the gradient of its weight. If that input is the result of a batch
norm, it follows from what the batch norm saves: its own input, and the moments.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.nn.modules.batchnorm import _BatchNorm

from torchkiln.nn.batch_norm import batch_norm_act, is_synchronized
from torchkiln.nn.convolution import conv_norm_act, conv_with_moments_of, norm_act, runs_batch_norm
from torchkiln.ops._conv_moments import bn_act_from
from torchkiln.ops._folding import PLAIN, is_transformed
from torchkiln.patch.pool import conv_norm_act_pool


class Source(NamedTuple):
    """What a result is computed from again."""

    x: Tensor
    """The input of the batch norm."""
    moments: Tensor
    weight: Tensor | None
    bias: Tensor | None
    act: str
    eps: float

    def result(self) -> Tensor:
        """The same numbers as in forward."""
        ops = torch.ops.torchkiln
        with torch.no_grad():
            statistics, _ = ops.sync_bn_statistics.default(
                self.x, self.moments[None], None, None, None, 0.0, self.eps
            )
            y: Tensor
            y, _ = ops.sync_bn_forward.default(
                self.x, statistics, self.weight, self.bias, None, self.act
            )
        return y


class Saved(NamedTuple):
    """A tensor that autograd saved, and the number of changes in place before."""

    tensor: Tensor
    version: int

    def result(self) -> Tensor:
        """The tensor, if it was not changed since."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: got version {self.tensor._version} of a tensor of shape "
                f"{list(self.tensor.shape)}, expected version {self.version}"
            )
        return self.tensor


@dataclass(frozen=True)
class Recomputed:
    """A result that the next convolution does not save."""

    y: Tensor
    source: Source

    def hooks(self) -> saved_tensors_hooks:
        """The context of a call that takes the result."""
        # The hooks refer to the address: the memory of the result is to be free after the call.
        address, shape, source = self.y.data_ptr(), self.y.shape, self.source

        def pack(tensor: Tensor) -> Source | Saved:
            is_result = tensor.data_ptr() == address and tensor.shape == shape
            return source if is_result else Saved(tensor, tensor._version)

        return saved_tensors_hooks(pack, lambda saved: saved.result())


Input = Tensor | Recomputed


def tensor_of(x: Input) -> Tensor:
    """The result itself."""
    return x.y if isinstance(x, Recomputed) else x


def hooks_of(x: Input) -> contextlib.AbstractContextManager[object]:
    """The context of a call that takes ``x``."""
    return x.hooks() if isinstance(x, Recomputed) else contextlib.nullcontext()


def can_recompute(norm: _BatchNorm, x: Tensor) -> bool:
    """Whether a batch norm of ``x`` may give a result that is computed again in backward."""
    if is_compiling() or not torch.is_grad_enabled() or is_transformed() or type(x) not in PLAIN:
        return False
    return norm.training and runs_batch_norm(norm) and not is_synchronized(norm)


def light_conv_norm_act(  # noqa: PLR0917
    conv: nn.Module, norm: _BatchNorm, x: Input, residual: Tensor | None, act: str, keeps: bool
) -> Input:
    """``act(norm(conv(x)) + residual)``.

    ``keeps`` is whether the result may be used by others than a call of this function.
    """
    with hooks_of(x):
        value = tensor_of(x)
        if keeps or residual is not None or not can_recompute(norm, value):
            return conv_norm_act(conv, norm, value, residual, act)
        known = conv_with_moments_of(conv, norm, value)
        y, moments = known or (conv(value), None)
    return recomputed(norm, y, moments, act)


def light_norm_act(
    norm: _BatchNorm, x: Tensor, residual: Tensor | None, act: str, keeps: bool
) -> Input:
    """``act(norm(x) + residual)``; arguments as for :func:`light_conv_norm_act`."""
    if keeps or residual is not None or not can_recompute(norm, x):
        return norm_act(norm, x, residual, act)
    return recomputed(norm, x, None, act)


def light_conv_norm_act_pool(
    conv: nn.Module, norm: _BatchNorm, pool: nn.Module, x: Input, act: str
) -> Tensor:
    """``pool(act(norm(conv(x))))``."""
    with hooks_of(x):
        return conv_norm_act_pool(conv, norm, pool, tensor_of(x), act)


def recomputed(norm: _BatchNorm, x: Tensor, moments: Tensor | None, act: str) -> Input:
    """``act(norm(x))``; ``moments`` are those of ``x``, if they are known."""
    if moments is None:
        moments = torch.ops.torchkiln.sync_bn_moments.default(x.detach())
    y = batch_norm_act(norm, x, None, act, functools.partial(bn_act_from, moments))
    return Recomputed(y, Source(x.detach(), moments, norm.weight, norm.bias, act, norm.eps))
