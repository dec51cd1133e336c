"""rows: an op of this package."""

from torch import nn

import torchkiln


class ModelNew(nn.Module):
    def forward(self, x):
        return torchkiln.softmax(x, -1)
