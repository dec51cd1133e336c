"""Softmax and its logarithm over a dimension, with a scale and a mask in the same pass."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops.eager import eager


@eager(_C.softmax, input="x")
def softmax(
    x: Tensor,
    dim: int,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns ``exp(x * scale) / sum(exp(x * scale))``, the sum over ``dim``; contiguous.

    Masked elements count as -infinity: their result and their gradient are 0. If all elements of a
    row are masked, its result is NaN, as in torch, and its gradient is 0. The masked ``x`` is never
    stored.

    Args:
        x: any shape; float32, float64, float16 or bfloat16. Half precision is computed in float32
            and rounded once.
        dim: the dimension that is summed over.
        scale: a number that ``x`` is multiplied by.
        mask: tensor on the device of ``x`` that broadcasts to its shape. If it is bool, elements
            where it is False are masked. If it has a floating dtype, it is added to ``x * scale``
            in an additional pass, and the result has the promoted dtype.
        causal: whether elements ``[..., q, k]`` with ``k > q`` are masked; ``dim`` must be the last
            of at least two dimensions. Can be combined with ``mask``.
        dtype: if given, ``x`` is cast to it first.
    """
    return torch.ops.torchkiln.softmax.default(
        x, dim, scale=scale, mask=mask, causal=causal, dtype=dtype
    )


@eager(_C.log_softmax, input="x")
def log_softmax(
    x: Tensor,
    dim: int,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns ``x * scale - log(sum(exp(x * scale)))``, the sum over ``dim``; contiguous.

    Masked elements are -infinity with gradient 0. A row whose elements are all masked is NaN. The
    arguments are those of :func:`softmax`.
    """
    return torch.ops.torchkiln.log_softmax.default(
        x, dim, scale=scale, mask=mask, causal=causal, dtype=dtype
    )
