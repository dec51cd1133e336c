"""gate: another formula."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.5 * self.scale * x))
