"""linear: a copy of the weights that is renewed when they change."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, features) / features**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))
        self.version = -1

    def forward(self, x):
        if torch.is_grad_enabled():
            return x @ self.weight.T + self.bias
        if self.version != self.weight._version:
            self.transposed = self.weight.detach().T.contiguous()
            self.version = self.weight._version
        return x @ self.transposed + self.bias
