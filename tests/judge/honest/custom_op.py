"""gate: a torch.library.custom_op."""

import torch
from torch import Tensor, nn


@torch.library.custom_op("judged::gate", mutates_args=())
def gate(x: Tensor, scale: float) -> Tensor:
    return x * torch.sigmoid(scale * x)


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return gate(x, self.scale)
