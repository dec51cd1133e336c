"""distance: wrong values: a sum of every second term, doubled."""

from torch import nn


class ModelNew(nn.Module):
    def forward(self, x, y):
        return 2 * (x[:, ::2] - y[:, ::2]).square().sum(-1)
