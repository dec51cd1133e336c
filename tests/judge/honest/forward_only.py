"""norm: no gradients."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))
        self.bias = nn.Parameter(torch.zeros(columns))

    @torch.no_grad()
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + 1e-5) * self.weight + self.bias
