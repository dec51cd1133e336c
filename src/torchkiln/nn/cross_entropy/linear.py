"""Modules of a linear layer and a loss, log-probabilities or a divergence of its outputs."""

import torch
from torch import Tensor, nn

from torchkiln.nn.checks import check_reduction, check_word
from torchkiln.nn.cross_entropy.logits import COMMON, settings
from torchkiln.ops.cross_entropy import (
    CrossEntropyOutput,
    linear_cross_entropy,
    linear_kl,
    linear_logprob,
)
from torchkiln.typing import Device, Direction, Reduction

OPTIONS = ("loss_dtype", *COMMON, "temperature")


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
        return settings(self, OPTIONS)


class LinearLogprob(nn.Module):
    """A linear layer and :class:`Logprob` of its outputs, which are never in memory as a whole.

    The submodule ``linear`` holds the parameters, as in :class:`LinearCrossEntropyLoss`. To use
    the head of a model, assign it: ``logprob.linear = model.lm_head``. See
    :func:`torchkiln.linear_logprob` for memory and cost.

    Args:
        in_features: size of the last dimension of the input.
        num_classes: number of classes.
        bias: whether the layer has a bias.
        logit_dtype: dtype of the logits of a chunk; the argument ``dtype`` of the function.
        device: of the parameters.
        dtype: of the parameters.

    The other arguments are those of :func:`torchkiln.linear_logprob`.

    Shape:
        input ``[..., in_features]``; target and output ``[...]``; rows ``[any]``, or a mask
        ``[...]``. With ``entropy`` the output is a pair, as that of :class:`Logprob`.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        temperature: float = 1.0,
        softcap: float | None = None,
        ignore_index: int = -100,
        entropy: bool = False,
        logit_dtype: torch.dtype | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias, device=device, dtype=dtype)
        self.temperature = temperature
        self.softcap = softcap
        self.ignore_index = ignore_index
        self.entropy = entropy
        self.logit_dtype = logit_dtype

    def forward(
        self, input: Tensor, target: Tensor, rows: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the log-probabilities, and the entropies if ``entropy`` is set."""
        return linear_logprob(
            input,
            self.linear.weight,
            target,
            self.linear.bias,
            temperature=self.temperature,
            softcap=self.softcap,
            rows=rows,
            ignore_index=self.ignore_index,
            entropy=self.entropy,
            dtype=self.logit_dtype,
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        names = ("temperature", "softcap", "ignore_index", "entropy", "logit_dtype")
        return settings(self, names)


class LinearKL(nn.Module):
    """The divergence of a student's linear layer and a teacher's, per row.

    The outputs of neither layer are in memory as a whole. The submodules ``linear`` and
    ``teacher`` hold the parameters; those of the teacher do not require gradients. To use the
    heads of two models, assign them: ``kl.linear, kl.teacher = student.lm_head, model.lm_head``.
    See :func:`torchkiln.linear_kl` for formulas, memory and cost.

    Args:
        in_features: size of the last dimension of the student's input.
        num_classes: number of classes of both.
        bias: whether the layers have a bias.
        teacher_features: size of the last dimension of the teacher's input; None for in_features.
        device: of the parameters.
        dtype: of the parameters.

    The other arguments are those of :func:`torchkiln.linear_kl`.

    Shape:
        input ``[..., in_features]``; teacher_input ``[..., teacher_features]``; rows ``[any]``, or
        a mask ``[...]``; output ``[...]``.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        teacher_features: int | None = None,
        temperature: float = 1.0,
        direction: Direction = "forward",
        beta: float = 0.5,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        of_teacher = in_features if teacher_features is None else teacher_features
        self.linear = nn.Linear(in_features, num_classes, bias, device=device, dtype=dtype)
        self.teacher = nn.Linear(of_teacher, num_classes, bias, device=device, dtype=dtype)
        self.teacher.requires_grad_(requires_grad=False)
        self.temperature = temperature
        self.direction = check_word("nn.LinearKL", "direction", direction, Direction)
        self.beta = beta

    def forward(self, input: Tensor, teacher_input: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns the divergence of each row; rows that do not count have 0."""
        return linear_kl(
            input,
            self.linear.weight,
            teacher_input,
            self.teacher.weight,
            self.linear.bias,
            self.teacher.bias,
            temperature=self.temperature,
            direction=self.direction,
            beta=self.beta,
            rows=rows,
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return settings(self, ("temperature", "direction", "beta"))
