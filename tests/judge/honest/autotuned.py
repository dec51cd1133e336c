"""rows: the faster of two ways, found at the first call."""

import time

import torch
from torch import nn


def first(x):
    return torch.softmax(x, -1)


def second(x):
    return torch.exp(torch.log_softmax(x, -1))


class ModelNew(nn.Module):
    chosen = None

    def forward(self, x):
        if self.chosen is None:
            times = []
            for way in (first, first):
                start = time.perf_counter()
                way(x)
                times.append(time.perf_counter() - start)
            self.chosen = [first, first][times.index(min(times))]
        return self.chosen(x)
