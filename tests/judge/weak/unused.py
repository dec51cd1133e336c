"""the result of aten.exp.default is not used."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        torch.exp(x)
        return torch.tanh(x)


def get_inputs():
    return [torch.randn(20, 30)]
