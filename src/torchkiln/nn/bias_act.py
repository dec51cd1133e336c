"""Modules of the bias and activation family."""

import torch
from torch import Tensor

from torchkiln.nn.bias import WithBias
from torchkiln.nn.checks import check_act
from torchkiln.ops.bias_act import bias_act
from torchkiln.typing import Activation, Device


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
        *,
        act: Activation = "relu",
        scale: float = 1.0,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, device, dtype)
        self.act = check_act("nn.BiasAct", act)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Applies the op to ``x``."""
        return bias_act(x, self.bias, scale=self.scale, act=self.act)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"{self.features}, act={self.act!r}, scale={self.scale}"
