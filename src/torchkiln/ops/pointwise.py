"""Elementwise sums and products, with broadcasting and dtype promotion."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._traced import promoted_dtype
from torchkiln.ops.eager import eager, is_foreign


@eager(_C.add, beside=("alpha",), input="a", other="b")
def add(a: Tensor | float, b: Tensor | float, *, alpha: float = 1) -> Tensor:
    """Returns ``a + alpha * b``, rounded once.

    Shapes, dtypes and layout follow :func:`torch.add`: ``a`` and ``b`` broadcast, and their dtypes
    are promoted; a number promotes as in ``tensor + number``. The promoted dtype must be float32,
    float64, float16 or bfloat16.

    Args:
        a: any shape, or a number.
        b: any shape that broadcasts with that of ``a``, or a number.
        alpha: a number.
    """
    if not isinstance(alpha, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(
            f"torchkiln.add: alpha: got {type(alpha).__name__}, expected a number; for a tensor "
            "call torchkiln.muladd(b, alpha, a)"
        )
    if alpha != 1:
        if isinstance(b, Tensor) and not b.is_floating_point():  # alpha takes no part in promotion
            b = b.to(promoted_dtype("add", {"a": a, "b": b}))
        return muladd(b, alpha, a)
    dtype = promoted_dtype("add", {"a": a, "b": b})
    if isinstance(a, Tensor):
        return torch.add(a, b)
    return torch.add(b, a) if isinstance(b, Tensor) else torch.tensor(a + b, dtype=dtype)


@eager(_C.muladd)
def muladd(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Returns ``a * b + c``, rounded once.

    Shapes, dtypes and layout follow torch's ``a * b + c``: all three broadcast, and the dtype of
    the product is promoted with that of ``c``; a number promotes as in ``tensor + number``. The
    promoted dtype must be float32, float64, float16 or bfloat16.

    Args:
        a: any shape, or a number.
        b: any shape that broadcasts with that of ``a``, or a number.
        c: any shape that broadcasts with that of ``a * b``, or a number.
    """
    dtype = promoted_dtype("muladd", {"a": a, "b": b, "c": c}, factors=2)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    x, y, z = (t.to(compute) if isinstance(t, Tensor) else t for t in (a, b, c))
    total = x * y + z
    if not isinstance(total, Tensor):  # all three are numbers
        total = torch.tensor(total, dtype=dtype)
    return total.to(dtype)


def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    """Returns ``input + value * tensor1 * tensor2``.

    With ``value=1`` this is :func:`muladd`, which rounds once. Other values, and 0-dimensional
    tensors of another dtype, go to :func:`torch.addcmul`, which is one pass, too.

    Args:
        input: any shape.
        tensor1: as ``a`` of :func:`muladd`.
        tensor2: as ``b`` of :func:`muladd`.
        value: a number.
    """
    if value == 1:
        result = muladd(tensor1, tensor2, input)
        # The dtype that muladd gives can only be wrong if it differs from the dtype of the input.
        if result.dtype is input.dtype or not promotes_apart(input, tensor1, tensor2):
            return result
    operands = {"input": input, "tensor1": tensor1, "tensor2": tensor2}
    if not any(map(is_foreign, operands.values())):
        promoted_dtype("addcmul", operands)
    return torch.addcmul(*operands.values(), value=value)


def promotes_apart(*operands: object) -> bool:
    """Whether ``a * b + c`` may have another dtype than the promotion of all three tensors."""
    tensors = [t for t in operands if isinstance(t, Tensor)]
    return any(t.dim() == 0 and t.dtype != tensors[0].dtype for t in tensors)
