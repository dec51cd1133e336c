"""Modules of the cross-entropy loss."""

import torch
from torch import Tensor, nn

from torchkiln.ops.cross_entropy import cross_entropy, linear_cross_entropy

COMMON = (
    *("ignore_index", "reduction", "label_smoothing", "z_loss", "check_target", "softcap"),
    *("return_z_loss", "return_accuracy"),
)
"""Attributes of both modules that are options of their functions."""
OPTIONS, LINEAR_OPTIONS = (*COMMON, "dtype", "inplace_backward"), (*COMMON, "temperature")


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """The cross-entropy of logits and classes or probabilities.

    Has the interface and the ``state_dict`` of :class:`torch.nn.CrossEntropyLoss`, and the
    additional arguments of :func:`torchkiln.cross_entropy`. ``weight`` is a buffer.

    Shape:
        logits ``[classes]``, ``[rows, classes]`` or ``[rows, classes, ...]``. The target has this
        shape for probabilities, and this shape without the classes for class indices.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        dtype: torch.dtype | None = None,
        check_target: bool = False,
        inplace_backward: bool = False,
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_accuracy: bool = False,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        self.z_loss = z_loss
        self.dtype = dtype
        self.check_target = check_target
        self.inplace_backward = inplace_backward
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_accuracy = return_accuracy

    def forward(self, logits: Tensor, target: Tensor) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]
        """Returns the loss, followed by what else was asked for."""
        return cross_entropy(
            logits,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            dtype=self.dtype,
            check_target=self.check_target,
            inplace_backward=self.inplace_backward,
            softcap=self.softcap,
            return_z_loss=self.return_z_loss,
            return_accuracy=self.return_accuracy,
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in OPTIONS)


class LinearCrossEntropyLoss(nn.Linear):
    """A linear layer and the cross-entropy of its outputs, which are never in memory as a whole.

    Parameters, initial values and ``state_dict`` are those of :class:`torch.nn.Linear`. To share
    the weight with an embedding, assign it: ``loss.weight = embedding.weight``. See
    :func:`torchkiln.linear_cross_entropy` for memory and cost.

    Args:
        features: size of the last dimension of the input.
        classes: number of classes.
        bias: whether the layer has a bias.
        class_weight: ``[classes]``, or None for ones; a buffer.
        loss_dtype: of the loss.
        device: of the parameters.
        dtype: of the parameters.

    All others are those of :func:`torchkiln.linear_cross_entropy`.

    Shape:
        input ``[..., features]``; target ``[...]``, int64.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        features: int,
        classes: int,
        bias: bool = False,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_dtype: torch.dtype | None = None,
        check_target: bool = False,
        softcap: float | None = None,
        temperature: float = 1.0,
        return_z_loss: bool = False,
        return_accuracy: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, classes, bias, device=device, dtype=dtype)
        self.register_buffer("class_weight", class_weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.loss_dtype = loss_dtype
        self.check_target = check_target
        self.softcap = softcap
        self.temperature = temperature
        self.return_z_loss = return_z_loss
        self.return_accuracy = return_accuracy

    def forward(self, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]
        """Returns the loss, followed by what else was asked for."""
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            self.bias,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            dtype=self.loss_dtype,
            check_target=self.check_target,
            softcap=self.softcap,
            temperature=self.temperature,
            return_z_loss=self.return_z_loss,
            return_accuracy=self.return_accuracy,
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        names = ("loss_dtype", *LINEAR_OPTIONS)
        settings = (f"{name}={getattr(self, name)!r}" for name in names)
        return ", ".join((super().extra_repr(), *settings))
