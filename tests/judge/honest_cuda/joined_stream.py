"""gate: a stream of its own, which waits and is waited for."""

import torch
from torch import nn

STREAM = torch.cuda.Stream()


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        now = torch.cuda.current_stream()
        STREAM.wait_stream(now)
        with torch.cuda.stream(STREAM):
            y = x * torch.sigmoid(self.scale * x)
        now.wait_stream(STREAM)
        y.record_stream(now)
        return y
