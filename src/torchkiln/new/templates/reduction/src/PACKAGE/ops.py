"""One number for each row, in one pass over memory."""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_unary

from PACKAGE import _C


def OPNAME(x: Tensor) -> Tensor:
    """Returns ``(x * x).sum(-1)``, contiguous.

    Args:
        x: ``[..., columns]``; float32, float64, float16 or bfloat16. A half precision is summed
            in float32 and rounded once.
    """
    if is_compiling() or has_torch_function_unary(x):
        seen: Tensor = torch.ops.PACKAGE.OPNAME.default(x)
        return seen
    return _C.OPNAME(x)
