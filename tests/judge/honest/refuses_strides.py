"""gate: an error for inputs that are not contiguous."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        if not x.is_contiguous():
            raise ValueError("x: got strides, expected a contiguous tensor")
        return x * torch.sigmoid(self.scale * x)
