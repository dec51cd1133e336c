"""gate: work between calls: a thread that never ends."""

import threading

import torch
from torch import nn


def work():
    x = torch.randn(64, 64)
    while True:
        x = (x @ x).tanh()


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        threading.Thread(target=work, daemon=True).start()

    def forward(self, x):
        return x * torch.sigmoid(self.scale * x)
