"""Modules of batch norm with an activation: subclasses of torch's that replace ``forward``."""

import torch
from torch import Tensor, nn

from torchkiln.nn.checks import check_act
from torchkiln.ops.batch_norm import bn_act


def batch_norm_act(
    module: nn.modules.batchnorm._BatchNorm, x: Tensor, residual: Tensor | None, act: str
) -> Tensor:
    """The call of the op with the parameters, statistics and settings of a batch norm."""
    module._check_input_dim(x)
    tracks = module.training and module.track_running_stats
    momentum = 0.0 if module.momentum is None else module.momentum
    if tracks and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:  # the mean over all batches
            momentum = 1.0 / float(module.num_batches_tracked)
    keeps = not module.training or module.track_running_stats
    return bn_act(
        x,
        module.weight,
        module.bias,
        module.running_mean if keeps else None,
        module.running_var if keeps else None,
        residual,
        act=act,
        training=module.training or (module.running_mean is None and module.running_var is None),
        momentum=momentum,
        eps=module.eps,
    )


class _BatchNormAct(nn.modules.batchnorm._BatchNorm):
    """The common part of the modules; ``state_dict`` is that of torch's batch norm."""

    def __init__(  # noqa: PLR0917
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        act: str = "relu",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device=device,
            dtype=dtype,
        )
        self.act = check_act(f"nn.{type(self).__name__}", act)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Applies the op to ``x``."""
        return batch_norm_act(self, x, residual, self.act)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        settings = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{settings}, act={self.act!r}"


class BatchNormAct1d(_BatchNormAct, nn.BatchNorm1d):
    """``act(batch_norm(x) + residual)``; a :class:`torch.nn.BatchNorm1d`.

    Args:
        num_features: the number of channels.
        eps: a number of at least 0.
        momentum: the weight of new running statistics; None for their mean over all batches.
        affine: whether the module has a weight, initially 1, and a bias, initially 0.
        track_running_stats: whether the module has running statistics for ``eval()``.
        act: one of none, square, relu, gelu, gelu_tanh, silu, sigmoid, tanh.
        device: of the parameters and statistics.
        dtype: of the parameters and statistics.

    Shape:
        x, residual and output ``[batch, channels]`` or ``[batch, channels, length]``.
    """


class BatchNormAct2d(_BatchNormAct, nn.BatchNorm2d):
    """``act(batch_norm(x) + residual)``; a :class:`torch.nn.BatchNorm2d`.

    Args:
        num_features: as for :class:`BatchNormAct1d`.
        eps: as for :class:`BatchNormAct1d`.
        momentum: as for :class:`BatchNormAct1d`.
        affine: as for :class:`BatchNormAct1d`.
        track_running_stats: as for :class:`BatchNormAct1d`.
        act: as for :class:`BatchNormAct1d`.
        device: as for :class:`BatchNormAct1d`.
        dtype: as for :class:`BatchNormAct1d`.

    Shape:
        x, residual and output ``[batch, channels, height, width]``.
    """


class BatchNormAct3d(_BatchNormAct, nn.BatchNorm3d):
    """``act(batch_norm(x) + residual)``; a :class:`torch.nn.BatchNorm3d`.

    Args:
        num_features: as for :class:`BatchNormAct1d`.
        eps: as for :class:`BatchNormAct1d`.
        momentum: as for :class:`BatchNormAct1d`.
        affine: as for :class:`BatchNormAct1d`.
        track_running_stats: as for :class:`BatchNormAct1d`.
        act: as for :class:`BatchNormAct1d`.
        device: as for :class:`BatchNormAct1d`.
        dtype: as for :class:`BatchNormAct1d`.

    Shape:
        x, residual and output ``[batch, channels, depth, height, width]``.
    """
