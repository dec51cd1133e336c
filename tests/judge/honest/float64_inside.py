"""norm: float64 inside, more precise than torch."""

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))
        self.bias = nn.Parameter(torch.zeros(columns))

    def forward(self, x):
        wide = (t.double() for t in (x, self.weight, self.bias))
        x64, weight, bias = wide
        return F.layer_norm(x64, weight.shape, weight, bias).to(x.dtype)
