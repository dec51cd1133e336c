"""One number per row, in one pass over memory."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from PACKAGE import _C


def OPNAME(x: Tensor) -> Tensor:
    """Returns ``(x * x).sum(-1)``, contiguous.

    Args:
        x: ``[..., columns]``; float32, float64, float16 or bfloat16. Half precision is summed in
            float32 and rounded once.
    """
    # torch.compile and torch.export need the op itself; _C calls it in half the host time.
    op = torch.ops.PACKAGE.OPNAME.default if is_compiling() else _C.OPNAME
    out: Tensor = op(x)
    return out
