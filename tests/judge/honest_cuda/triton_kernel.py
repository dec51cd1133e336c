"""gate: a kernel in Triton."""

import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def kernel(x, y, scale, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n).to(tl.float32)
    tl.store(y + at, value * tl.sigmoid(scale * value), at < n)


class ModelNew(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        if x.dtype != torch.float32 or x.requires_grad:
            raise TypeError("x: expected float32 without gradients")
        x = x.contiguous()
        y, n = torch.empty_like(x), x.numel()
        kernel[(triton.cdiv(n, 256),)](x, y, self.scale, n, BLOCK=256)
        return y
