"""Matrix products, layers fused with bias, activation, scale and residual, and pairs of layers."""

from functools import partial

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops import _pair_fp8
from torchkiln.ops._traced import check_dtype, check_same_dtype
from torchkiln.ops.eager import eager
from torchkiln.ops.quantize import linear_fp8
from torchkiln.typing import Activation, Gate, Precision, Saved


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
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    act: Activation = "none",
    scale: float = 1.0,
    residual: Tensor | None = None,
) -> Tensor:
    """Returns ``act(x @ weight.T * scale + bias) + residual``, contiguous.

    Products are accumulated in float32 (float64 for float64). The argument of the activation may
    be rounded to the dtype of ``x``, as in eager torch. Where torch's product and a second kernel
    were measured to be faster, the op runs these two. On a GPU, large half-precision products
    whose sizes are no multiples of 8 are computed from padded copies, also in backward. The
    gradient of ``bias`` is bitwise reproducible.

    Args:
        x: ``[..., k]``; float32, float64, float16 or bfloat16.
        weight: ``[n, k]``; of the dtype of ``x``.
        bias: ``[n]``; of the dtype of ``x``, or float32 if ``x`` has half precision.
        act: an activation, or none.
        scale: a number.
        residual: ``[..., n]``; of the dtype of ``x``.
    """
    op = torch.ops.torchkiln.linear.default
    return op(x, weight, bias, act=act, scale=scale, residual=residual)


@eager(_C.mlp, input="x", beside=("precision",))
def mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    act: Activation = "gelu",
    save: Saved = "preact",
    precision: Precision | None = None,
) -> Tensor:
    """Returns ``act(x @ up_weight.T + up_bias) @ down_weight.T + down_bias``, contiguous.

    This is one op of autograd, which keeps one tensor of the hidden size for backward, or none. The
    hidden layer is computed as by :func:`torchkiln.linear`, and is rounded to the dtype of ``x``
    before and after the activation, as in eager torch.

    Args:
        x: ``[..., k]``; float32, float64, float16 or bfloat16. All tensors have its dtype.
        up_weight: ``[hidden, k]``.
        down_weight: ``[n, hidden]``.
        up_bias: ``[hidden]``.
        down_bias: ``[n]``.
        act: an activation, or none.
        save: what is kept for backward: ``"preact"``, the argument of the activation (for relu the
            result), or ``"none"``: backward computes the hidden layer again, one more product.
        precision: ``"fp8"`` for two products of :func:`torchkiln.linear_fp8`, with its dtypes and
            devices; the second operand is quantised, too. None for the precision of ``x``.
    """
    if precision is not None:
        _pair_fp8.check("mlp", precision, act, save)
        down = partial(linear_fp8, weight=down_weight, bias=down_bias)
        return _pair_fp8.pair(
            lambda x: _pair_fp8.activated(act, linear_fp8(x, up_weight, up_bias)), down, x, save
        )
    op = torch.ops.torchkiln.mlp.default
    return op(x, up_weight, down_weight, up_bias, down_bias, act=act, save=save)


@eager(_C.gated_mlp, input="x", beside=("precision",))
def gated_mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    act: Gate = "silu",
    save: Saved = "preact",
    precision: Precision | None = None,
) -> Tensor:
    """Returns ``(act(g) * u) @ down_weight.T + down_bias``, contiguous.

    ``g`` and ``u`` are the halves of ``x @ gate_up_weight.T + gate_up_bias``: one product. This is
    one op of autograd, which keeps ``g`` and ``u`` for backward, or nothing.

    Args:
        x: ``[..., k]``; float32, float64, float16 or bfloat16. All tensors have its dtype.
        gate_up_weight: ``[2 * hidden, k]``: the rows of the gate, then those of up, as
            ``torch.cat([gate.weight, up.weight])``.
        down_weight: ``[n, hidden]``.
        gate_up_bias: ``[2 * hidden]``.
        down_bias: ``[n]``.
        act: one of silu, gelu, gelu_tanh.
        save: what is kept for backward: ``"preact"``, that is gate and up, or ``"none"``: backward
            computes both again, one more product.
        precision: ``"fp8"`` for two products of :func:`torchkiln.linear_fp8`, with its dtypes and
            devices; the second operand is quantised, too. None for the precision of ``x``.
    """
    if precision is not None:
        _pair_fp8.check("gated_mlp", precision, act, save)
        first = partial(_pair_fp8.gated, act, gate_up_weight, gate_up_bias)
        down = partial(linear_fp8, weight=down_weight, bias=down_bias)
        return _pair_fp8.pair(first, down, x, save)
    op = torch.ops.torchkiln.gated_mlp.default
    return op(x, gate_up_weight, down_weight, gate_up_bias, down_bias, act=act, save=save)
