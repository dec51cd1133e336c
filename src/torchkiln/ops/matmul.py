"""Products of matrices, and what follows them, fused into the product."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._eager import eager


@eager(_C.matmul)
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of matrices ``a @ b``, contiguous, with torch's broadcasting.

    It is torch's own product, which was measured to be no slower than the kernels of this package.
    Sums are taken in float32 (float64 for float64); TensorFloat-32 is used where torch allows it.
    Under ``torch.compile`` it is torch's own op, which Inductor fuses with its neighbours.

    Args:
        a: ``[..., m, k]``, or ``[k]`` for one row; float32, float64, float16 or bfloat16.
        b: ``[..., k, n]``, or ``[k]`` for one column; of the dtype of ``a``.
    """
    return torch.matmul(a, b)


@eager(_C.linear)
def linear(  # noqa: PLR0917
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: str = "none",
    scale: float = 1.0,
    residual: Tensor | None = None,
) -> Tensor:
    """Returns ``act(x @ weight.T * scale + bias) + residual``, contiguous.

    Sums are taken in float32 (float64 for float64). What the activation gets may have been rounded
    to the dtype of ``x``, as in eager torch. Where a product of torch's own with the rest behind it
    is faster, that is what is called. The gradient of ``bias`` is bitwise the same from run to run.

    Args:
        x: ``[..., k]``; float32, float64, float16 or bfloat16.
        weight: ``[n, k]``; of the dtype of ``x``.
        bias: ``[n]``; of the dtype of ``x``, or float32 beside a half precision.
        act: one of none, square, relu, gelu, gelu_tanh, silu, sigmoid, tanh.
        scale: a number.
        residual: ``[..., n]``; of the dtype of ``x``.
    """
    return torch.ops.torchkiln.linear.default(x, weight, bias, act, scale, residual)
