"""distance: two threads, which have ended at the return."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

POOL = ThreadPoolExecutor(2)


class ModelNew(nn.Module):
    def forward(self, x, y):
        half = x.shape[0] // 2

        def part(rows):
            with torch.set_grad_enabled(grad):
                return (x[rows] - y[rows]).square().sum(-1)

        grad = torch.is_grad_enabled()
        return torch.cat(list(POOL.map(part, (slice(half), slice(half, None)))))
