"""distance: an error for other numbers of columns."""

from torch import nn


class ModelNew(nn.Module):
    def forward(self, x, y):
        if x.shape[-1] != 72:
            raise ValueError(f"x: got {x.shape[-1]} columns, expected 72")
        return (x - y).square().sum(-1)
