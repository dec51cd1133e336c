"""rows: only the given dtype: the result is float32."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.softmax(x.float(), -1)
