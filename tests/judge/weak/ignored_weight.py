"""its output ignores weight bias."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30))
        self.bias = nn.Parameter(torch.randn(30))

    def forward(self, x):
        return torch.softmax(x * self.weight + self.bias.sum(), -1)


def get_inputs():
    return [torch.randn(20, 30)]
