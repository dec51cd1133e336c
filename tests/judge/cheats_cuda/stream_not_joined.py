"""gate: late result: the current stream does not wait for the end."""

import torch
from torch import nn

STREAM = torch.cuda.Stream()


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        STREAM.wait_stream(torch.cuda.current_stream())
        out = torch.zeros_like(x)
        STREAM.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(STREAM):
            torch.cuda._sleep(20_000_000)
            out.copy_(x * torch.sigmoid(self.scale * x))
        return out
