"""gate: returns its input: unchanged."""

from torch import nn


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()

    def forward(self, x):
        return x
