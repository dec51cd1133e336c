"""linear: the product in four parts of the sum."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, features) / features**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        parts = zip(x.chunk(4, 1), self.weight.chunk(4, 1), strict=True)
        wide = torch.promote_types(x.dtype, torch.float32)
        total = sum((a.to(wide) @ b.to(wide).T for a, b in parts), self.bias.to(wide))
        return total.to(x.dtype)
