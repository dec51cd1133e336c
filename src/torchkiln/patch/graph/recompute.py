"""Calls of convolution, batch norm and activation whose results are computed again in backward.

A convolution saves its input for the gradient of its weight. If a batch norm has computed that
input, backward can compute it again from the tensors that the batch norm saves: input and moments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.batchnorm import _BatchNorm

from torchkiln.nn.batch_norm import is_synchronized
from torchkiln.nn.convolution import conv_norm_act, convolved, norm_act, runs_batch_norm
from torchkiln.ops._folding import PLAIN, is_transformed
from torchkiln.patch.graph.pool import conv_norm_act_pool, norm_act_pool
from torchkiln.patch.recompute import Recomputed, Saved, has_other_hooks, saved
from torchkiln.typing import Activation


@dataclass(frozen=True)
class Source:
    """The tensors and settings from which backward computes a result again."""

    x: Saved
    """The input of the batch norm."""
    moments: Saved
    weight: Saved | None
    bias: Saved | None
    act: Activation
    eps: float

    def result(self) -> Tensor:
        """The result, computed again with the same bits as in forward."""
        ops = torch.ops.torchkiln
        x, moments = self.x.result(), self.moments.result()
        weight, bias = (s and s.result() for s in (self.weight, self.bias))
        with torch.no_grad():
            statistics, _ = ops._sync_bn_statistics.default(
                x, moments[None], None, None, None, 0.0, self.eps
            )
            y: Tensor
            y, _ = ops._sync_bn_forward.default(x, statistics, weight, bias, None, self.act)
        return y


Input = Tensor | Recomputed


def tensor_of(x: Input) -> Tensor:
    """The tensor of an input, :class:`Recomputed` or not."""
    return x.y if isinstance(x, Recomputed) else x


def can_recompute(norm: _BatchNorm, x: Tensor, *, inside: bool) -> bool:
    """Whether backward may compute the result of a batch norm of ``x`` again."""
    if is_compiling() or not torch.is_grad_enabled() or is_transformed() or type(x) not in PLAIN:
        return False
    is_own = runs_batch_norm(norm, inside=inside) and not is_synchronized(norm)
    return norm.training and is_own and not has_other_hooks()


def light_convolved(
    conv: nn.Module, norm: _BatchNorm, x: Input, *, inside: bool
) -> tuple[Tensor, Tensor | None]:
    """:func:`convolved` of an input that the convolution need not save."""
    if not isinstance(x, Recomputed):
        return convolved(conv, norm, x, inside=inside)
    with x.hooks():
        return convolved(conv, norm, x.y, inside=inside)


def light_conv_norm_act(
    conv: nn.Module,
    norm: _BatchNorm,
    x: Input,
    residual: Tensor | None,
    act: Activation,
    keeps: bool,
    *,
    in_place: bool = False,
    inside: bool = False,
) -> Input:
    """``act(norm(conv(x)) + residual)``.

    ``keeps`` is whether anything but the next call of this function may read the result;
    ``in_place`` and ``inside`` are as for :func:`norm_act`.
    """
    if not norm.training:
        x = tensor_of(x)
        return conv_norm_act(conv, norm, x, residual, act, in_place=in_place, inside=inside)
    y, moments = light_convolved(conv, norm, x, inside=inside)
    if keeps or residual is not None or not can_recompute(norm, y, inside=inside):
        return norm_act(norm, y, residual, act, moments, in_place=in_place, inside=inside)
    return recomputed(norm, y, moments, act, inside=inside)


def light_norm_act(
    norm: _BatchNorm,
    x: Tensor,
    residual: Tensor | None,
    act: Activation,
    keeps: bool,
    *,
    in_place: bool = False,
    inside: bool = False,
) -> Input:
    """``act(norm(x) + residual)``; arguments as for :func:`light_conv_norm_act`."""
    if keeps or residual is not None or not can_recompute(norm, x, inside=inside):
        return norm_act(norm, x, residual, act, in_place=in_place, inside=inside)
    return recomputed(norm, x, None, act, inside=inside)


def light_conv_norm_act_pool(
    conv: nn.Module,
    norm: _BatchNorm,
    pool: nn.Module,
    x: Input,
    act: Activation,
    *,
    inside: bool = False,
) -> Tensor:
    """``pool(act(norm(conv(x))))``; ``inside`` as for :func:`norm_act`."""
    if not norm.training:
        return conv_norm_act_pool(conv, norm, pool, tensor_of(x), act, inside=inside)
    y, moments = light_convolved(conv, norm, x, inside=inside)
    return norm_act_pool(norm, pool, y, act, moments, inside=inside)


def recomputed(
    norm: _BatchNorm, x: Tensor, moments: Tensor | None, act: Activation, *, inside: bool
) -> Input:
    """``act(norm(x))``; ``moments`` are the moments of ``x`` if computed before."""
    if moments is None:
        moments = torch.ops.torchkiln._sync_bn_moments.default(x.detach())
    y = norm_act(norm, x, None, act, moments, inside=inside)
    affine: tuple[Tensor | None, ...] = norm.weight, norm.bias
    weight, bias = (None if p is None else saved(p) for p in affine)
    return Recomputed(y, Source(saved(x), saved(moments), weight, bias, act, norm.eps))
