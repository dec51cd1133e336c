"""rows: tables are made at the first call."""

import torch
from torch import nn


class ModelNew(nn.Module):
    ones = None

    def forward(self, x):
        if self.ones is None:
            self.ones = {}
        key = (x.shape[-1], x.dtype)
        if key not in self.ones:
            self.ones[key] = torch.ones(x.shape[-1], 1, dtype=x.dtype)
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / (e @ self.ones[key])
