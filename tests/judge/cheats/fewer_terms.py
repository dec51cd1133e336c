"""linear: wrong values: a sum without its last terms."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, features) / features**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x[:, :-16] @ self.weight[:, :-16].T + self.bias
