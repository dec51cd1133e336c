"""gate: work on another stream: which does not wait for the inputs."""

import torch
from torch import nn

STREAM = torch.cuda.Stream()


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        with torch.cuda.stream(STREAM):
            y = x * torch.sigmoid(self.scale * x)
        STREAM.synchronize()
        return y
