"""distance: input changed: it holds the differences."""

from torch import nn


class ModelNew(nn.Module):
    def forward(self, x, y):
        x -= y
        return x.square().sum(-1)
