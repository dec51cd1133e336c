"""Elementwise operators."""

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_variadic

from torchkiln import _C


def add(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a + b``.

    Shapes and dtypes follow :func:`torch.add`: ``a`` and ``b`` broadcast, and their dtypes are
    promoted. The promoted dtype must be float32, float64, float16 or bfloat16.

    Args:
        a: any shape.
        b: any shape that broadcasts with that of ``a``.
    """
    if is_compiling():
        return torch.add(a, b)
    if has_torch_function_variadic(a, b):
        seen: Tensor = torch.ops.torchkiln.add.default(a, b)
        return seen
    return _C.add(a, b)
