"""Sums over a moving window of each row."""

import torch
from torch import Tensor
from torchkiln.extend import eager

from PACKAGE import _C


@eager(_C.OPNAME)
def OPNAME(x: Tensor, window: int = 4) -> Tensor:
    """Returns the sum of each element and the ``window - 1`` before it in its row, contiguous.

    Args:
        x: ``[..., columns]``; float32, float64, float16 or bfloat16. Half precision is summed in
            float32 and rounded once.
        window: at least 1. Elements before the start of the row count as 0.
    """
    out: Tensor = torch.ops.PACKAGE.OPNAME.default(x, window)
    return out
