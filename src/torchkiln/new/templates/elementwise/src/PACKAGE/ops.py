"""A gate on a tensor, in one pass over memory."""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_variadic

from PACKAGE import _C


def OPNAME(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """Returns ``x * sigmoid(scale * gate)``, contiguous.

    Args:
        x: any shape; float32, float64, float16 or bfloat16. A half precision is computed in
            float32 and rounded once.
        gate: of the shape and dtype of ``x``.
        scale: a number.
    """
    if is_compiling() or has_torch_function_variadic(x, gate):
        seen: Tensor = torch.ops.PACKAGE.OPNAME.default(x, gate, scale)
        return seen
    return _C.OPNAME(x, gate, scale)
