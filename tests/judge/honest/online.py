"""rows: softmax in blocks of columns with a running maximum."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        most = torch.full((x.shape[0], 1), -torch.inf, dtype=wide)
        total = torch.zeros_like(most)
        for part in x.to(wide).split(16, 1):
            now = torch.maximum(most, part.amax(1, keepdim=True))
            total = total * torch.exp(most - now) + torch.exp(part - now).sum(1, keepdim=True)
            most = now
        return (torch.exp(x.to(wide) - most) / total).to(x.dtype)
