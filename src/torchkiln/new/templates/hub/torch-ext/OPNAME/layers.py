"""Layers without a state: a forward and two flags, and nothing else."""

import torch
from torch import nn

from ._ops import ops


class TYPENAME(nn.Module):
    """``silu(a) * b`` for the halves of the last dimension."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the gated unit."""
        return ops.OPNAME_forward(x.contiguous())
