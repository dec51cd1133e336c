"""gate: late result: a thread launches the kernel after the return."""

import threading
import time

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        out, x = torch.zeros_like(x), x.clone()

        def work():
            time.sleep(0.02)
            out.copy_(x * torch.sigmoid(self.scale * x))

        threading.Thread(target=work).start()
        return out
