"""Modules of the cross-entropy loss."""

import torch
from torch import Tensor, nn

from torchkiln.nn.checks import check_reduction
from torchkiln.ops.cross_entropy import CrossEntropyOutput, cross_entropy, linear_cross_entropy
from torchkiln.typing import Device, Reduction

COMMON = (
    *("ignore_index", "reduction", "label_smoothing", "z_loss", "check_target", "softcap"),
    *("return_z_loss", "return_accuracy"),
)
"""Attributes of both modules that are passed as options to the functions."""
OPTIONS, LINEAR_OPTIONS = (*COMMON, "inplace_backward"), (*COMMON, "temperature")


def settings(loss: nn.Module, options: tuple[str, ...]) -> str:
    """The options of a module, for ``repr``."""
    return ", ".join(f"{name}={getattr(loss, name)!r}" for name in ("loss_dtype", *options))


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """The cross-entropy of logits and classes or probabilities.

    Has the interface and the ``state_dict`` of :class:`torch.nn.CrossEntropyLoss`, and the
    additional arguments of :func:`torchkiln.cross_entropy`. ``weight`` is a buffer.

    Shape:
        input ``[classes]``, ``[rows, classes]`` or ``[rows, classes, ...]``. The target has this
        shape for probabilities, and this shape without the classes for class indices.
    """

    weight: Tensor | None
    reduction: Reduction

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_dtype: torch.dtype | None = None,
        check_target: bool = False,
        inplace_backward: bool = False,
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_accuracy: bool = False,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=check_reduction("nn.CrossEntropyLoss", reduction),
            label_smoothing=label_smoothing,
        )
        self.z_loss = z_loss
        self.loss_dtype = loss_dtype
        self.check_target = check_target
        self.inplace_backward = inplace_backward
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_accuracy = return_accuracy

    def forward(self, input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:  # type: ignore[override]
        """Returns the loss, or a :class:`torchkiln.CrossEntropyOutput` if options request it."""
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            loss_dtype=self.loss_dtype,
            check_target=self.check_target,
            inplace_backward=self.inplace_backward,
            softcap=self.softcap,
            return_z_loss=self.return_z_loss,
            return_accuracy=self.return_accuracy,
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return settings(self, OPTIONS)


class LinearCrossEntropyLoss(nn.Module):
    """A linear layer and the cross-entropy of its outputs, which are never in memory as a whole.

    The submodule ``linear``, a :class:`torch.nn.Linear`, holds the parameters, as in torch's module
    of this name; the submodule's forward and hooks are not called. To share the weight with an
    embedding, assign it: ``loss.linear.weight = embedding.weight``. See
    :func:`torchkiln.linear_cross_entropy` for memory and cost.

    Args:
        in_features: size of the last dimension of the input.
        num_classes: number of classes.
        bias: whether the layer has a bias.
        weight: ``[num_classes]``, a factor for each class, or None for ones; a buffer.
        loss_dtype: of the loss.
        device: of the parameters.
        dtype: of the parameters.

    The other arguments are those of :func:`torchkiln.linear_cross_entropy`.

    Shape:
        input ``[..., in_features]``; target ``[...]``, int64.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_dtype: torch.dtype | None = None,
        check_target: bool = False,
        softcap: float | None = None,
        temperature: float = 1.0,
        return_z_loss: bool = False,
        return_accuracy: bool = False,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = check_reduction("nn.LinearCrossEntropyLoss", reduction)
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.loss_dtype = loss_dtype
        self.check_target = check_target
        self.softcap = softcap
        self.temperature = temperature
        self.return_z_loss = return_z_loss
        self.return_accuracy = return_accuracy

    def forward(self, input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        """Returns the loss, or a :class:`torchkiln.CrossEntropyOutput` if options request it."""
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            loss_dtype=self.loss_dtype,
            check_target=self.check_target,
            softcap=self.softcap,
            temperature=self.temperature,
            return_z_loss=self.return_z_loss,
            return_accuracy=self.return_accuracy,
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return settings(self, LINEAR_OPTIONS)
