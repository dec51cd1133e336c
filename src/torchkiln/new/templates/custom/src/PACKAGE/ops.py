"""Sums over a moving window of each row."""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_unary

from PACKAGE import _C


def OPNAME(x: Tensor, window: int = 4) -> Tensor:
    """Returns the sum of each element and the ``window - 1`` before it in its row, contiguous.

    Args:
        x: ``[..., columns]``; float32, float64, float16 or bfloat16. A half precision is summed
            in float32 and rounded once.
        window: at least 1; what lies before the row counts as 0.
    """
    if is_compiling() or has_torch_function_unary(x):
        seen: Tensor = torch.ops.PACKAGE.OPNAME.default(x, window)
        return seen
    return _C.OPNAME(x, window)
