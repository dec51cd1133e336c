"""A gate on a tensor, in one pass over memory."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from PACKAGE import _C


def OPNAME(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """Returns ``x * sigmoid(scale * gate)``, contiguous.

    Args:
        x: any shape; float32, float64, float16 or bfloat16. Half precision is computed in float32
            and rounded once.
        gate: of the shape and dtype of ``x``.
        scale: a number.
    """
    # torch.compile and torch.export need the op itself; _C calls it in half the host time.
    op = torch.ops.PACKAGE.OPNAME.default if is_compiling() else _C.OPNAME
    out: Tensor = op(x, gate, scale)
    return out
