"""Matrix products, optionally fused with bias, activation, scale and residual."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._traced import check_dtype, check_same_dtype
from torchkiln.ops.eager import eager


@eager(_C.matmul, input="a", other="b")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of matrices ``a @ b``, contiguous, with torch's broadcasting.

    Calls torch's product, which was measured to be no slower than the kernels of this package.
    Products are accumulated in float32 (float64 for float64), with TensorFloat-32 inputs if torch
    allows it. Under ``torch.compile`` the graph contains torch's op, which Inductor can fuse.

    Args:
        a: ``[..., m, k]``, or ``[k]`` for one row; float32, float64, float16 or bfloat16.
        b: ``[..., k, n]``, or ``[k]`` for one column; of the dtype of ``a``.
    """
    check_dtype("matmul", "a", a)
    if not torch.is_autocast_enabled(a.device.type):
        check_same_dtype("matmul", "b", b, "a", a)
    return torch.matmul(a, b)


@eager(_C.linear, input="x")
def linear(  # noqa: PLR0917
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: str = "none",
    scale: float = 1.0,
    residual: Tensor | None = None,
) -> Tensor:
    """Returns ``act(x @ weight.T * scale + bias) + residual``, contiguous.

    Products are accumulated in float32 (float64 for float64). The argument of the activation may
    be rounded to the dtype of ``x``, as in eager torch. Where torch's product followed by one more
    kernel was measured to be faster, the op runs those. The gradient of ``bias`` is bitwise
    reproducible.

    Args:
        x: ``[..., k]``; float32, float64, float16 or bfloat16.
        weight: ``[n, k]``; of the dtype of ``x``.
        bias: ``[n]``; of the dtype of ``x``, or float32 if ``x`` has half precision.
        act: one of none, square, relu, gelu, gelu_tanh, silu, sigmoid, tanh.
        scale: a number.
        residual: ``[..., n]``; of the dtype of ``x``.
    """
    return torch.ops.torchkiln.linear.default(x, weight, bias, act, scale, residual)
