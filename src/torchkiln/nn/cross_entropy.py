"""Module of the cross-entropy loss."""

import torch
from torch import Tensor, nn

from torchkiln.ops.cross_entropy import cross_entropy


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """The cross-entropy of logits and classes or probabilities.

    Has the interface and the ``state_dict`` of :class:`torch.nn.CrossEntropyLoss`, and the
    additional arguments of :func:`torchkiln.cross_entropy`.

    Args:
        weight: ``[classes]``, or None for ones; a buffer.
        ignore_index: rows with this target class have no loss and no gradient.
        reduction: none, mean or sum.
        label_smoothing: the share of the probability that is distributed evenly over the classes.
        z_loss: the factor of ``log(sum(exp(logits)))**2``.
        dtype: of the loss.
        check_target: whether to validate the target first, which waits for the GPU.
        inplace_backward: whether backward writes the gradient into the memory of the logits.
        softcap: the bound of ``softcap * tanh(logits / softcap)``, or None.
        return_z_loss: whether to return the z-loss after the loss.
        return_accuracy: whether to return the accuracy after them.

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
            weight=self.weight,
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
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, dtype={self.dtype}, "
            f"check_target={self.check_target}, inplace_backward={self.inplace_backward}, "
            f"softcap={self.softcap}, return_z_loss={self.return_z_loss}, "
            f"return_accuracy={self.return_accuracy}"
        )
