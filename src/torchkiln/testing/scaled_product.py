"""A linear layer in float8_e4m3fn by torch's own ops: casts, and ``torch.nn.functional.scaled_mm``.

Its blocks and scales are those of :func:`torchkiln.linear_fp8`, so that both do the same work. On a
CPU, where torch multiplies no such blocks, both multiply the values in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchkiln.ops.quantize import QuantizedWeight

BLOCK = 128
STEP = 16
"""Sizes of the operands of torch's product are multiples of it."""
MOST = 448.0
"""The largest number of the dtype."""

Cast = tuple[Tensor, Tensor]
"""A matrix in float8_e4m3fn, and the scales of its blocks."""


def cast(x: Tensor, rows: int) -> Cast:
    """A matrix in blocks of ``rows`` x 128 elements, with scales that are powers of two."""
    n, k = x.shape
    whole = F.pad(x, (0, -k % BLOCK, 0, -n % rows))
    blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))
    most = blocks.abs().amax((1, 3), keepdim=True).float()
    scale = (most / MOST).log2().ceil().clamp(min=-126).exp2().masked_fill(most == 0, 1)
    data = (blocks / scale).to(torch.float8_e4m3fn).view(whole.shape)
    return data[:n, :k].contiguous(), scale[:, 0, :, 0]


def cast_weight(weight: Tensor) -> QuantizedWeight:
    """A weight in squares of 128 x 128 elements, and its transposed matrix."""
    data, scale = cast(weight, BLOCK)
    return QuantizedWeight(data, scale, data.t().contiguous(), scale.t())


def padded(data: Tensor) -> Tensor:
    """The matrix with zeros up to multiples of 16. torch pads bytes, not E4M3."""
    rows, columns = (-size % STEP for size in data.shape)
    if rows == columns == 0:
        return data
    return F.pad(data.view(torch.uint8), (0, columns, 0, rows)).view(data.dtype)


def widened(a: Cast, rows: int) -> Tensor:
    """The values of a matrix in blocks of ``rows`` x 128 elements, in float32."""
    data, scale = a
    each = scale.repeat_interleave(BLOCK, 1)[:, : data.shape[1]]
    return data.float() * (each if rows == 1 else each.repeat_interleave(rows, 0)[: len(data)])


def product(a: Cast, b: Cast, dtype: torch.dtype) -> Tensor:
    """The rows of ``a``, in blocks of 1 x 128, times those of ``b``, in squares."""
    if not a[0].is_cuda:
        return F.linear(widened(a, 1), widened(b, BLOCK)).to(dtype)
    left, right = padded(a[0]), padded(b[0])
    scale = F.pad(a[1].t(), (0, len(left) - len(a[0])), value=1.0).contiguous().t()
    squares = F.pad(b[1], (0, -b[1].shape[1] % 4)).contiguous().t()
    kinds = F.ScalingType
    y = F.scaled_mm(
        *(left, right.t(), scale, kinds.BlockWise1x128, squares, kinds.BlockWise128x128),
        output_dtype=dtype,
    )
    return y[: len(a[0]), : len(b[0])]


class Layer(torch.autograd.Function):
    """The product of the rows of x with a weight, and its gradients as two more such products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, given: QuantizedWeight | None) -> Tensor:
        """The product; ``given`` is the quantised weight."""
        data, scale, *turned = cast_weight(weight) if given is None else given
        ctx.dtypes = x.dtype, weight.dtype
        ctx.turned = turned
        ctx.columns = cast(x.t(), BLOCK) if ctx.needs_input_grad[1] else None
        return product(cast(x, 1), (data, scale), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradients of x and of the weight."""
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(cast(grad, 1), ctx.turned, ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            of_weight = product(cast(grad.t(), 1), ctx.columns, ctx.dtypes[1])
        return of_x, of_weight, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, quantized: QuantizedWeight | None
) -> Tensor:
    """The layer, for x of any rank."""
    function: Any = Layer
    y: Tensor = function.apply(x.reshape(-1, x.shape[-1]), weight, quantized)
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias
