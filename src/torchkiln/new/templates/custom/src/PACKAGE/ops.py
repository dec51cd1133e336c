"""Sums over a moving window of each row."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from PACKAGE import _C


def OPNAME(x: Tensor, window: int = 4) -> Tensor:
    """Returns the sum of each element and the ``window - 1`` before it in its row, contiguous.

    Args:
        x: ``[..., columns]``; float32, float64, float16 or bfloat16. Half precision is summed in
            float32 and rounded once.
        window: at least 1. Elements before the start of the row count as 0.
    """
    # torch.compile and torch.export need the op itself; _C calls it in half the host time.
    op = torch.ops.PACKAGE.OPNAME.default if is_compiling() else _C.OPNAME
    out: Tensor = op(x, window)
    return out
