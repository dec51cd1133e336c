"""gate: overwritten result: every replay returns one buffer."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.graphs = {}

    def forward(self, x):
        key = (x.shape, x.dtype)
        if key not in self.graphs:
            kept = x.clone()
            kept * torch.sigmoid(self.scale * kept)  # warm
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = kept * torch.sigmoid(self.scale * kept)
            self.graphs[key] = graph, out, kept
        graph, out, kept = self.graphs[key]
        kept.copy_(x)
        graph.replay()
        return out
