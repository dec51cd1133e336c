"""Base class of modules with a bias along the last dimension."""

import torch
from torch import nn

from torchkiln.typing import Device


class WithBias(nn.Module):
    """A trainable bias of ``features`` elements, initially zero."""

    def __init__(self, features: int, device: Device | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.features = features
        self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the bias to zero."""
        nn.init.zeros_(self.bias)
