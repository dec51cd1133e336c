"""gate: overwritten result: every call returns one buffer."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.out = {}

    def forward(self, x):
        key = (x.shape, x.dtype)
        if key not in self.out:
            self.out[key] = torch.empty(x.shape, dtype=x.dtype)
        self.out[key].copy_(x * torch.sigmoid(self.scale * x))
        return self.out[key]
