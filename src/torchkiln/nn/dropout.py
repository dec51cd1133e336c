"""Modules of dropout before a residual sum."""

import torch
from torch import Tensor, nn

from torchkiln.nn.bias import WithBias
from torchkiln.nn.checks import check_p
from torchkiln.ops.dropout import bias_dropout_add, dropout_add
from torchkiln.typing import Device


class DropoutAdd(nn.Module):
    """``dropout(x) + residual``; nothing is dropped after ``eval()``.

    Args:
        p: the probability that an element is dropped.

    Shape:
        x, residual and output have one shape, which is arbitrary.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = check_p("nn.DropoutAdd", p)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Applies the op."""
        return dropout_add(x, residual, self.p, self.training)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"p={self.p}"


class BiasDropoutAdd(WithBias):
    """``dropout(x + bias) + residual`` with a trainable bias along the last dimension.

    Args:
        features: size of the last dimension of the input.
        p: the probability that an element is dropped.

    Shape:
        x, residual and output ``[..., features]``.
    """

    def __init__(
        self,
        features: int,
        p: float = 0.5,
        *,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, device, dtype)
        self.p = check_p("nn.BiasDropoutAdd", p)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Applies the op."""
        return bias_dropout_add(x, self.bias, residual, self.p, self.training)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"{self.features}, p={self.p}"
