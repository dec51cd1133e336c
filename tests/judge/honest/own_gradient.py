"""gate: an autograd function with its own backward."""

import torch
from torch import nn


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        s = torch.sigmoid(scale * x)
        ctx.save_for_backward(x, s)
        ctx.scale = scale
        return x * s

    @staticmethod
    def backward(ctx, grad):
        x, s = ctx.saved_tensors
        return grad * s * (1 + ctx.scale * x * (1 - s)), None


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return Gate.apply(x, self.scale)
