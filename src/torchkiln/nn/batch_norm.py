"""Modules of batch norm with an activation: subclasses of torch's that replace ``forward``."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchkiln.nn.checks import check_act, check_eps
from torchkiln.nn.plain import MISSING, attribute
from torchkiln.ops._conv_moments import bn_act_from
from torchkiln.ops.batch_norm import bn_act, sync_bn_act
from torchkiln.typing import Activation, Device


def batch_norm_act(
    module: nn.modules.batchnorm._BatchNorm,
    x: Tensor,
    residual: Tensor | None,
    act: Activation,
    op: Callable[..., Tensor] = bn_act,
) -> Tensor:
    """Calls the op with the parameters, statistics and settings of a batch norm.

    ``op`` takes the arguments of :func:`torchkiln.bn_act`.
    """
    module._check_input_dim(x)
    # Read from the dicts of the module: nn.Module takes 1 us to look up an attribute.
    own, buffers = module._parameters, module._buffers
    momentum = 0.0 if module.momentum is None else module.momentum
    if module.training and module.track_running_stats:
        batches = read(module, buffers, "num_batches_tracked")
        if batches is not None:
            batches.add_(1)
            if module.momentum is None:  # the mean over all batches
                momentum = 1.0 / float(batches)
    mean, var = read(module, buffers, "running_mean"), read(module, buffers, "running_var")
    keeps = not module.training or module.track_running_stats
    return op(
        x,
        read(module, own, "weight"),
        read(module, own, "bias"),
        mean if keeps else None,
        var if keeps else None,
        residual,
        act=act,
        training=module.training or (mean is None and var is None),
        momentum=momentum,
        eps=module.eps,
    )


def read(module: nn.Module, place: dict[str, Any], name: str) -> Any:
    """The attribute of a batch norm; ``place`` is the dict that has it if the class is plain."""
    is_plain = type(module) in PLAIN_CLASSES and name in place
    return place[name] if is_plain else attribute(module, name)


def sync_batch_norm_act(
    module: nn.modules.batchnorm._BatchNorm,
    x: Tensor,
    residual: Tensor | None,
    act: Activation,
    moments: Tensor | None = None,
) -> Tensor:
    """:func:`batch_norm_act`, with statistics over all processes if the module synchronises.

    ``moments`` are the moments of ``x``, if the op that made ``x`` computed them.
    """
    if not is_synchronized(module):
        op = bn_act if moments is None else functools.partial(bn_act_from, moments)
        return batch_norm_act(module, x, residual, act, op)
    group: Any = attribute(module, "process_group")
    module._check_input_dim(x)
    own, buffers = module._parameters, module._buffers
    tracks, batches = module.track_running_stats, read(module, buffers, "num_batches_tracked")
    momentum: float | Tensor = 0.0 if module.momentum is None else module.momentum
    if tracks and batches is not None:
        batches.add_(1)
        # the mean over all batches; a number would be a copy to the host
        if module.momentum is None:
            momentum = batches
    return sync_bn_act(
        x,
        read(module, own, "weight"),
        read(module, own, "bias"),
        read(module, buffers, "running_mean") if tracks else None,
        read(module, buffers, "running_var") if tracks else None,
        residual,
        act=act,
        momentum=momentum,
        eps=module.eps,
        group=group or dist.group.WORLD,
        moments=moments,
    )


def is_synchronized(module: nn.modules.batchnorm._BatchNorm) -> bool:
    """Whether a call exchanges statistics with other processes, as a ``SyncBatchNorm`` does."""
    if not module.training or not isinstance(module, (nn.SyncBatchNorm, SyncBatchNormAct)):
        return False
    group: Any = attribute(module, "process_group", MISSING)
    if group is MISSING or not dist.is_available() or not dist.is_initialized():
        return False
    group = dist.group.WORLD if group is None else group  # get_world_size() takes 0.5 us
    return isinstance(group, dist.ProcessGroup) and group.size() > 1


class _BatchNormAct(nn.modules.batchnorm._BatchNorm):
    """The common part of the modules; ``state_dict`` is that of torch's batch norm."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        act: Activation = "relu",
    ) -> None:
        name = f"nn.{type(self).__name__}"
        super().__init__(
            num_features,
            check_eps(name, eps),
            momentum,
            affine,
            track_running_stats,
            device=device,
            dtype=dtype,
        )
        self.act = check_act(name, act)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Applies the op to ``input``."""
        return batch_norm_act(self, input, residual, self.act)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        settings = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{settings}, act={self.act!r}"


class BatchNormAct1d(_BatchNormAct, nn.BatchNorm1d):
    """``act(batch_norm(input) + residual)``; a :class:`torch.nn.BatchNorm1d`.

    Args:
        num_features: the number of channels.
        eps: a number of at least 0.
        momentum: the weight of new running statistics; None for their mean over all batches.
        affine: whether the module has a weight, initially 1, and a bias, initially 0.
        track_running_stats: whether the module has running statistics for ``eval()``.
        device: of the parameters and statistics.
        dtype: of the parameters and statistics.
        act: an activation of :data:`torchkiln.typing.Activation`.

    Shape:
        input, residual and output ``[batch, channels]`` or ``[batch, channels, length]``.
    """


class BatchNormAct2d(_BatchNormAct, nn.BatchNorm2d):
    """``act(batch_norm(input) + residual)``; a :class:`torch.nn.BatchNorm2d`.

    The arguments are those of :class:`BatchNormAct1d`.

    Shape:
        input, residual and output ``[batch, channels, height, width]``.
    """


class BatchNormAct3d(_BatchNormAct, nn.BatchNorm3d):
    """``act(batch_norm(input) + residual)``; a :class:`torch.nn.BatchNorm3d`.

    The arguments are those of :class:`BatchNormAct1d`.

    Shape:
        input, residual and output ``[batch, channels, depth, height, width]``.
    """


class SyncBatchNormAct(_BatchNormAct):
    """``act(batch_norm(input) + residual)``; in training with statistics over all processes.

    Formula and ``state_dict`` equal those of :class:`torch.nn.SyncBatchNorm`, on any device and
    process group. Forward runs one collective: each process sends the moments of its batch,
    ``2 * num_features + 1`` float64 numbers. Backward runs one of ``2 * num_features`` numbers. The
    host never waits, so a CUDA graph can capture a step. Batch sizes may differ, or be 0.
    With one process, and in eval mode, the module is a :class:`BatchNormAct2d` of any rank.

    Args:
        process_group: the processes; None for all.

    The other arguments are those of :class:`BatchNormAct1d`.

    Shape:
        input, residual and output ``[batch, channels, ...]``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        *,
        act: Activation = "relu",
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            act=act,
        )
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Applies the op to ``input``."""
        return sync_batch_norm_act(self, input, residual, self.act)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replaces the batch norms of a model by this class, as torch's function of this name.

        ``BatchNormAct1d``, ``2d`` and ``3d`` keep their activation; torch's batch norms have none.
        Parameters and statistics stay the same tensors. :func:`torchkiln.fuse` may run before or
        after this method, and accepts models that torch's function has converted.

        Args:
            module: a model, or a batch norm.
            process_group: the processes; None for all.

        Returns:
            The model, changed in place, or a new module in place of a batch norm.
        """
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return cls._like(module, process_group)
        for name, child in module.named_children():
            module.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return module

    @classmethod
    def _like(cls, norm: nn.modules.batchnorm._BatchNorm, process_group: Any) -> "SyncBatchNormAct":
        act = norm.act if isinstance(norm, _BatchNormAct) else "none"
        made = cls(
            norm.num_features,
            norm.eps,
            norm.momentum,
            norm.affine,
            norm.track_running_stats,
            process_group,
            "meta",
            act=act,
        )
        for name in ("weight", "bias"):
            made.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            made.register_buffer(name, getattr(norm, name))
        made.training = norm.training
        return made


PLAIN_CLASSES = frozenset(
    (
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        *(BatchNormAct1d, BatchNormAct2d, BatchNormAct3d, SyncBatchNormAct),
    )
)
"""Classes without properties. FSDP and others swap the class for one that gathers parameters."""
