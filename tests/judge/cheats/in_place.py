"""gate: input changed: it holds the result."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x.mul_(torch.sigmoid(self.scale * x)).clone()
