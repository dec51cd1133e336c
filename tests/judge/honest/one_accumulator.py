"""linear: terms are added one after the other."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, features) / features**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        total = torch.zeros(x.shape[0], self.weight.shape[0], dtype=wide)
        for k in range(x.shape[1]):
            total = total + x[:, k, None].to(wide) * self.weight[None, :, k].to(wide)
        return (total + self.bias.to(wide)).to(x.dtype)
