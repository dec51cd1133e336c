"""One number per row, in one pass over memory."""

import torch
from torch import Tensor
from torchkiln.extend import eager

from PACKAGE import _C


@eager(_C.OPNAME)
def OPNAME(x: Tensor) -> Tensor:
    """Returns ``(x * x).sum(-1)``, contiguous.

    Args:
        x: ``[..., columns]``; float32, float64, float16 or bfloat16. Half precision is summed in
            float32 and rounded once.
    """
    out: Tensor = torch.ops.PACKAGE.OPNAME.default(x)
    return out
