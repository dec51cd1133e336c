"""Modules of the cross-entropy and log-probabilities of logits."""

import torch
from torch import Tensor, nn

from torchkiln.nn.checks import check_reduction
from torchkiln.ops.cross_entropy import CrossEntropyOutput, cross_entropy, logprob
from torchkiln.typing import Reduction

COMMON = (
    *("ignore_index", "reduction", "label_smoothing", "z_loss", "check_target", "softcap"),
    *("return_z_loss", "return_accuracy"),
)
"""Attributes of the losses, of logits and of a linear layer, that the functions take as options."""
OPTIONS = ("loss_dtype", *COMMON, "inplace_backward")


def settings(module: nn.Module, options: tuple[str, ...]) -> str:
    """The options of a module, for ``repr``."""
    return ", ".join(f"{name}={getattr(module, name)!r}" for name in options)


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


class Logprob(nn.Module):
    """The log-probability ``log(softmax(input / temperature)[target])`` per row.

    See :func:`torchkiln.logprob`; the arguments are its options.

    Shape:
        input ``[..., classes]``; target and output ``[...]``. With ``entropy`` the output is a pair
        of such tensors: the log-probability and the entropy ``-sum(p * log(p))``.
    """

    def __init__(
        self, *, temperature: float = 1.0, ignore_index: int = -100, entropy: bool = False
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.entropy = entropy

    def forward(self, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the log-probabilities, and the entropies if ``entropy`` is set."""
        return logprob(
            input,
            target,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
            entropy=self.entropy,
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return settings(self, ("temperature", "ignore_index", "entropy"))
