"""Modules of the bias and activation family."""

import torch
from torch import Tensor

from torchkiln.nn.bias import WithBias
from torchkiln.nn.checks import check_act
from torchkiln.ops.bias_act import bias_act


class BiasAct(WithBias):
    """``act(x * scale + bias)`` with a trainable bias along the last dimension.

    Args:
        features: size of the last dimension of the input.
        act: an activation, or none.
        scale: a fixed factor.

    Shape:
        input and output ``[..., features]``.
    """

    def __init__(
        self,
        features: int,
        act: str = "relu",
        scale: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, device, dtype)
        self.act = check_act("nn.BiasAct", act)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Applies the op to ``x``."""
        return bias_act(x, self.bias, self.scale, self.act)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"{self.features}, act={self.act!r}, scale={self.scale}"


class ScaleBiasReLU(BiasAct):
    """``relu(x * scale + bias)`` with a trainable bias along the last dimension.

    Args:
        features: size of the last dimension of the input.
        scale: a fixed factor.

    Shape:
        input and output ``[..., features]``.
    """

    def __init__(
        self,
        features: int,
        scale: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, "relu", scale, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"{self.features}, scale={self.scale}"
