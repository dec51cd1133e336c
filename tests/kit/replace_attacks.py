"""Modules that tests share which try to make replace() wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FACTOR = 1.702


def quick(x: Tensor, factor: float = 1.702) -> Tensor:
    return x * torch.sigmoid(factor * x)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class ByGroups(nn.Module):
    """An RMS norm of each half of the batch: the same as one of each row only for two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(2, -1) if x.dim() == 2 else x
        return rms(rows, 1e-6).reshape(x.shape) * self.weight


ROWS = torch.randn(7, 64)


class ByGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return quick(x, FACTOR)
