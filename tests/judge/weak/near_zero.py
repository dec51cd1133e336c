"""its output is near zero."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1) * 1e-9


def get_inputs():
    return [torch.randn(20, 30)]
