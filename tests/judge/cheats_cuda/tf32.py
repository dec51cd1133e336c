"""linear: environment switch: TF32 is allowed."""

import torch
from torch import nn

torch.set_float32_matmul_precision("high")


class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, features) / features**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight.T + self.bias
