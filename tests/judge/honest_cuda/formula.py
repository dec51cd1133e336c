"""gate: an op of torchkiln.jit.elementwise, with gradients."""

from torch import nn

from torchkiln import jit

gate = jit.elementwise("x * sigmoid(x * scale)", "x, scale=1.0")


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return gate(x, self.scale)
