"""gate: a kernel of torchkiln.jit."""

import torch
from torch import nn

from torchkiln import jit

SOURCE = """
__global__ void gate(const float* x, float* y, float scale, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] / (1.0f + expf(-scale * x[i]));
}
"""


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.kernel = jit.inline(SOURCE).gate

    def forward(self, x):
        if x.dtype != torch.float32:
            raise TypeError(f"x: got {x.dtype}, expected float32")
        if x.requires_grad:
            raise RuntimeError("x: got a tensor that requires a gradient")
        x = x.contiguous()
        y, n = torch.empty_like(x), x.numel()
        if n:
            self.kernel[(n + 255) // 256, 256](x, y, self.scale, n)
        return y
