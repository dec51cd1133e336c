"""distance: one product per row in place of a difference and a sum."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x, y):
        d = x - y
        wide = torch.promote_types(d.dtype, torch.float32)
        return (d.to(wide)[:, None] @ d.to(wide)[:, :, None]).flatten().to(x.dtype)
