"""Softmax and its logarithm over a dimension, with a scale and a mask in the same pass."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._eager import eager


@eager(_C.softmax)
def softmax(
    x: Tensor,
    dim: int,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Returns ``exp(x * scale) / sum(exp(x * scale))``, the sum over ``dim``; contiguous.

    What takes no part counts as -infinity: its result and its gradient are 0. A row in which
    nothing takes part is NaN, as in torch, and its gradient is 0. The masked ``x`` is never stored.

    Args:
        x: any shape; float32, float64, float16 or bfloat16. A half precision is computed in float32
            and rounded once.
        dim: the dimension that is summed over.
        scale: a number that ``x`` is multiplied by.
        mask: bool, of a shape that broadcasts to that of ``x``; True where an element takes part.
            On the device of ``x``.
        causal: whether element ``[..., q, k]`` takes part only where ``k <= q``; ``dim`` must be
            the last of at least two dimensions. A mask can be given, too.
    """
    return torch.ops.torchkiln.softmax.default(x, dim, scale=scale, mask=mask, causal=causal)


@eager(_C.log_softmax)
def log_softmax(
    x: Tensor,
    dim: int,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Returns ``x * scale - log(sum(exp(x * scale)))``, the sum over ``dim``; contiguous.

    What takes no part is -infinity, and its gradient is 0; a row of nothing else is NaN.

    Args:
        x: as for :func:`softmax`.
        dim: as for :func:`softmax`.
        scale: as for :func:`softmax`.
        mask: as for :func:`softmax`.
        causal: as for :func:`softmax`.
    """
    return torch.ops.torchkiln.log_softmax.default(x, dim, scale=scale, mask=mask, causal=causal)
