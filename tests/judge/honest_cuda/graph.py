"""gate: a CUDA graph, whose output is copied."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.graphs = {}

    def forward(self, x):
        if x.requires_grad or torch.cuda.is_current_stream_capturing():
            return x * torch.sigmoid(self.scale * x)
        key = (x.shape, x.dtype)
        if key not in self.graphs:
            kept = x.clone(memory_format=torch.contiguous_format)
            kept * torch.sigmoid(self.scale * kept)  # warm
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = kept * torch.sigmoid(self.scale * kept)
            self.graphs[key] = graph, out, kept
        graph, out, kept = self.graphs[key]
        kept.copy_(x)
        graph.replay()
        return out.clone()
