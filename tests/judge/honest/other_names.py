"""linear: weights under other names, made by the same random numbers."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        weight = torch.randn(outputs, features) / features**0.5
        self.both = nn.Parameter(torch.cat([weight, torch.randn(outputs)[:, None]], 1))

    def forward(self, x):
        return x @ self.both[:, :-1].T + self.both[:, -1]
