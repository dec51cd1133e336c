"""Modules of convolution, batch norm, residual sum and activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from torchkiln.nn.batch_norm import (
    SyncBatchNormAct,
    sync_batch_norm_act,
)
from torchkiln.nn.checks import check_act
from torchkiln.nn.plain import is_torchs
from torchkiln.ops._conv_moments import conv_with_moments
from torchkiln.ops._conv_routes import CONVOLUTIONS as CALLS
from torchkiln.ops._conv_routes import HALF, Geometry, Sizes, geometry_of, run_folded
from torchkiln.ops._folding import Parts, forget
from torchkiln.ops.activation import ACTIVATIONS
from torchkiln.ops.batch_norm import bn_act
from torchkiln.typing import Activation, Device

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORM_OF = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
"""The class of batch norm, by the rank of the input."""
SYNC_NORMS = (nn.SyncBatchNorm, SyncBatchNormAct)
BATCH_NORMS = (*NORM_OF.values(), *SYNC_NORMS)


def is_batch_norm(module: nn.Module | None) -> bool:
    """Whether the module is torch's batch norm, or ``SyncBatchNormAct`` without an activation."""
    if type(module) is SyncBatchNormAct:
        return module.act == "none"
    return type(module) in BATCH_NORMS


def runs_batch_norm(module: nn.Module, *, inside: bool = False) -> bool:
    """Whether a call of the module runs a batch norm and nothing else.

    With ``inside``, the caller asks about torch's batch norm inside the forward of a derived class.
    It has a proof that the forward runs torch's batch norm and then calls submodules, and it has
    checked that the module has no hooks.
    """
    return inside or (is_batch_norm(module) and is_torchs(module, BATCH_NORMS))


def norm_act(
    norm: _BatchNorm,
    x: Tensor,
    residual: Tensor | None,
    act: Activation,
    moments: Tensor | None = None,
    *,
    in_place: bool = False,
    inside: bool = False,
) -> Tensor:
    """``act(norm(x) + residual)``, in one op if it supports the norm and the residual.

    ``moments`` are the moments of ``x``, if :func:`convolved` computed them. With ``in_place`` the
    residual is added in place. So the sum keeps the dtype of the norm's result, even where autocast
    gives the residual another dtype. ``inside`` as for :func:`runs_batch_norm`.
    """
    fits = residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    if runs_batch_norm(norm, inside=inside) and fits:
        return sync_batch_norm_act(norm, x, residual, act, moments)
    y: Tensor = sync_batch_norm_act(norm, x, None, "none", moments) if inside else norm(x)
    if residual is not None:
        y = y.add_(residual) if in_place else y + residual
    return y if act == "none" else ACTIVATIONS[act](y)


def conv_norm_act(
    conv: nn.Module,
    norm: _BatchNorm,
    x: Tensor,
    residual: Tensor | None,
    act: Activation,
    *,
    in_place: bool = False,
    inside: bool = False,
) -> Tensor:
    """``act(norm(conv(x)) + residual)``.

    In eval mode the batch norm is folded into the weight of the convolution, unless
    :func:`run_folded` returns None. A fold is valid as long as the parameters keep their versions.
    A compiled graph cannot check versions, so it contains the batch norm. ``in_place`` and
    ``inside`` as for :func:`norm_act`.
    """
    parts = None if norm.training or is_compiling() else parts_of(conv, norm, x, inside=inside)
    if parts is None:
        y, moments = convolved(conv, norm, x, inside=inside)
        return norm_act(norm, y, residual, act, moments, in_place=in_place, inside=inside)
    assert isinstance(conv, _ConvNd)
    padded, padding = x, conv.padding
    if conv.padding_mode != "zeros":
        padded = F.pad(x, conv._reversed_padding_repeated_twice, conv.padding_mode)
        padding = "valid"
    geometry = geometry_of(parts.weight, conv.stride, padding, conv.dilation, conv.groups)
    folded = run_folded(norm, padded, parts, residual, geometry, act=act, eps=norm.eps)
    if folded is not None:
        return folded
    y = CALLS[x.dim()](padded, parts.weight, parts.bias, *geometry)
    if residual is None or (residual.shape == y.shape and residual.dtype == y.dtype):
        return bn_act(y, *parts[2:], residual, act=act, eps=norm.eps)
    return norm_act(norm, y, residual, act, in_place=in_place, inside=inside)


def parts_of(conv: nn.Module, norm: _BatchNorm, x: Tensor, *, inside: bool = False) -> Parts | None:
    """The tensors of a convolution and a batch norm in eval mode.

    None if their calls run anything else, or do not take ``x``.
    """
    if not is_torchs(conv, CONVOLUTIONS) or not runs_batch_norm(norm, inside=inside):
        return None
    # Read from the dicts of the modules: nn.Module takes 1 us to look up an attribute.
    given, own, buffers = conv._parameters, norm._parameters, norm._buffers
    weight, mean, var = (
        given.get("weight"),
        buffers.get("running_mean"),
        buffers.get("running_var"),
    )
    if weight is None or mean is None or var is None or not (has_own(given) and has_own(own)):
        return None
    cls, dims = type(norm), x.dim()
    if dims != weight.dim():
        return None
    is_of_rank = issubclass(cls, NORM_OF[dims]) if inside else cls is NORM_OF[dims]
    if not is_of_rank and cls not in SYNC_NORMS:
        return None
    return Parts(weight, given["bias"], own["weight"], own["bias"], mean, var)


def has_own(parameters: Mapping[str, Tensor | None]) -> bool:
    """Whether the dict has weight and bias; in a replica of DataParallel they are attributes."""
    return "weight" in parameters and "bias" in parameters


def convolved(
    conv: nn.Module, norm: _BatchNorm, x: Tensor, *, inside: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``conv(x)``, and the moments of this result if one kernel computes both for training."""
    if is_compiling():
        return conv(x), None
    if norm.training:
        forget(norm)
    given = conv._parameters
    if not has_own(given) or not is_torchs(conv, CONVOLUTIONS):
        return conv(x), None
    assert isinstance(conv, _ConvNd)
    weight, bias = given["weight"], given["bias"]
    assert weight is not None
    if not (x.is_cuda and x.dtype in HALF and norm.training):
        return conv._conv_forward(x, weight, bias), None  # 2 us faster than a call of conv
    known = None
    if runs_batch_norm(norm, inside=inside):
        geometry = Geometry(conv.stride, conv.padding, conv.dilation, conv.groups)
        known = conv_with_moments(x, weight, bias, geometry)
    return (conv._conv_forward(x, weight, bias), None) if known is None else known


class _ConvBNAct(nn.Module):
    """The common part of the modules."""

    convolution: ClassVar[Callable[..., _ConvNd]]
    batch_norm: ClassVar[Callable[..., _BatchNorm]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sizes,
        stride: int | Sizes = 1,
        padding: int | Sizes | str = 0,
        dilation: int | Sizes = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        act: Activation = "relu",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
    ) -> None:
        super().__init__()
        self.act = check_act(f"nn.{type(self).__name__}", act)
        self.conv: nn.Module = self.convolution(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups=groups,
            bias=bias,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
        )
        self.bn = self.batch_norm(out_channels, eps, momentum, device=device, dtype=dtype)

    @classmethod
    def from_modules(cls, conv: nn.Module, bn: _BatchNorm, *, act: Activation = "relu") -> Self:
        """Wraps two modules: any convolution, transposed or not, and a batch norm.

        Args:
            conv: the convolution, which becomes the submodule ``conv``.
            bn: the batch norm, which becomes the submodule ``bn``.
            act: as for the class.
        """
        if not isinstance(bn, _BatchNorm):
            raise TypeError(
                f"torchkiln.nn.{cls.__name__}.from_modules: bn: got {type(bn).__name__}, expected "
                "a batch norm of torch.nn"
            )
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.act = check_act(f"nn.{cls.__name__}", act)
        module.conv, module.bn = conv, bn
        module.training = bn.training
        return module

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Applies the op to ``x``."""
        return conv_norm_act(self.conv, self.bn, x, residual, self.act)

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of training and drops the fold, which a later call renews."""
        forget(self.bn)
        return super().train(mode)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"act={self.act!r}"


class ConvBNAct1d(_ConvBNAct):
    """``act(bn(conv(x)) + residual)`` of a :class:`torch.nn.Conv1d` and a batch norm.

    Args:
        in_channels: the channels of the input.
        out_channels: the channels of the output.
        kernel_size: a number, or one for each dimension, like stride, padding and dilation.
        padding: as for :class:`torch.nn.Conv1d`; a number, or ``"same"`` or ``"valid"``.
        bias: whether the convolution has a bias.
        padding_mode: one of zeros, reflect, replicate, circular.
        device: of the parameters and statistics.
        dtype: of the parameters and statistics.
        act: an activation of :data:`torchkiln.typing.Activation`.
        eps: of the batch norm.
        momentum: of the batch norm.

    The other arguments are those of :class:`torch.nn.Conv1d`.

    Shape:
        x ``[batch, in_channels, length]``; residual and output ``[batch, out_channels, length]``.
    """

    convolution = nn.Conv1d
    batch_norm = nn.BatchNorm1d


class ConvBNAct2d(_ConvBNAct):
    """``act(bn(conv(x)) + residual)`` of a :class:`torch.nn.Conv2d` and a batch norm.

    The submodules ``conv`` and ``bn`` hold the parameters, as in timm's ``ConvNormAct``. In eval
    mode without gradients the batch norm is folded into the convolution, as by
    :func:`torchkiln.conv_bn_act`. The fold is renewed when a parameter, a statistic or the mode
    changes; copies, pickles and ``state_dict`` leave it out. Submodules that have hooks or
    parametrizations, or are of other classes, are called one by one.

    The arguments are those of :class:`ConvBNAct1d`.

    Shape:
        x ``[batch, in_channels, height, width]``; residual and output ``[batch, out_channels,
        height, width]``.
    """

    convolution = nn.Conv2d
    batch_norm = nn.BatchNorm2d


class ConvBNAct3d(_ConvBNAct):
    """``act(bn(conv(x)) + residual)`` of a :class:`torch.nn.Conv3d` and a batch norm.

    The arguments are those of :class:`ConvBNAct1d`.

    Shape:
        x ``[batch, in_channels, depth, height, width]``; residual and output ``[batch,
        out_channels, depth, height, width]``.
    """

    convolution = nn.Conv3d
    batch_norm = nn.BatchNorm3d
