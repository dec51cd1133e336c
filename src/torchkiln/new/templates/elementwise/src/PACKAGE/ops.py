"""A gate on a tensor, in one pass over memory."""

import torch
from torch import Tensor
from torchkiln.extend import eager

from PACKAGE import _C


@eager(_C.OPNAME)
def OPNAME(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """Returns ``x * sigmoid(scale * gate)``, contiguous.

    Args:
        x: any shape; float32, float64, float16 or bfloat16. Half precision is computed in float32
            and rounded once.
        gate: of the shape and dtype of ``x``.
        scale: a number.
    """
    out: Tensor = torch.ops.PACKAGE.OPNAME.default(x, gate, scale)
    return out
