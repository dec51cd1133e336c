"""gate: wrong gradient: the incoming one."""

import torch
from torch import nn


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return x * torch.sigmoid(scale * x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return Gate.apply(x, self.scale)
