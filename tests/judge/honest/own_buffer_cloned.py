"""gate: a buffer of its own, whose copy is returned."""

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
        torch.mul(x.detach(), torch.sigmoid(self.scale * x.detach()), out=self.out[key])
        return self.out[key].clone()
