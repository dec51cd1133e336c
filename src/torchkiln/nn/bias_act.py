"""Modules of the bias and activation family."""

import torch
from torch import Tensor, nn

from torchkiln.bias_act import scale_bias_relu


class ScaleBiasReLU(nn.Module):
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
        super().__init__()
        self.features = features
        self.scale = scale
        self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the bias to zero."""
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the op to ``x``."""
        return scale_bias_relu(x, self.bias, self.scale)

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"{self.features}, scale={self.scale}"
