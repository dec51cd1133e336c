"""norm: a running mean and variance, column by column."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))
        self.bias = nn.Parameter(torch.zeros(columns))

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, m2 = wide[:, 0], torch.zeros_like(wide[:, 0])
        for i in range(1, wide.shape[1]):
            delta = wide[:, i] - mean
            mean = mean + delta / (i + 1)
            m2 = m2 + delta * (wide[:, i] - mean)
        scale = torch.rsqrt(m2 / wide.shape[1] + 1e-5)
        normal = (wide - mean[:, None]) * scale[:, None]
        return (normal * self.weight.to(wide.dtype) + self.bias.to(wide.dtype)).to(x.dtype)
