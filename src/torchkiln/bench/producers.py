"""Specs of the ops that write E4M3, for ``torchkiln bench rms_norm_fp8``.

Tests of the ops check their results; these specs are only for timing. Each op is timed in turns
with torch's op and a cast in torch. Its ceiling is the copy of the bytes that it must move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln.testing import OpSpec, Sample

BLOCK, LARGEST = 128, 448
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Shape = tuple[int, int]
Tensors = tuple[Tensor, ...]


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """Finite rows of whole blocks in E4M3, with scales that are powers of two, by torch's ops."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    data, scale = cast_to(blocks, blocks.abs().amax(-1, keepdim=True))
    return data.flatten(-2), scale


def cast_to(x: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Elements in E4M3, with the scales that bring the largest ones to at most 448."""
    mantissa, exponent = torch.frexp(most.float() / LARGEST)
    power = exponent - (mantissa == 0.5).int()  # rounds up to a power of two
    scale = torch.where(mantissa == 0, 1.0, torch.ldexp(torch.ones_like(mantissa), power))
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)


def flat(result: Any) -> Tensors:
    """The tensors of a result; a quantised tensor counts as data and scale, without source."""
    parts = result if type(result) is tuple else (result,)
    found: list[Tensor] = []
    for part in parts:
        found += [part] if isinstance(part, Tensor) else [part.data, part.scale]
    return tuple(found)


def rows(device: torch.device, dtype: torch.dtype, shape: Shape) -> Sample:
    """A call with one matrix."""
    return Sample("bench", (torch.randn(shape, device=device, dtype=dtype),))


def normed(*, residual: bool, bias: bool) -> Callable[[torch.device, torch.dtype, Shape], Sample]:
    """A function that makes calls of a norm."""

    def make(device: torch.device, dtype: torch.dtype, shape: Shape) -> Sample:
        x = [torch.randn(shape, device=device, dtype=dtype) for _ in range(1 + residual)]
        given = [torch.rand(shape[1], device=device, dtype=dtype) for _ in range(1 + bias)]
        return Sample("bench", (*x, shape[1:], *given))

    return make


def packed(device: torch.device, dtype: torch.dtype, shape: Shape) -> Sample:
    """Gate and up as the halves of a matrix; the result of the gate has the given shape."""
    return rows(device, dtype, (shape[0], 2 * shape[1]))


def with_gradient(device: torch.device, dtype: torch.dtype, shape: Shape) -> Sample:
    """A gradient of a gate, and gate and up."""
    (gate,) = packed(device, dtype, shape).args
    return Sample("bench", (torch.randn(shape, device=device, dtype=dtype), gate))


def quantized(device: torch.device, dtype: torch.dtype, shape: Shape) -> Sample:
    """A call with a matrix in E4M3."""
    data, scale, _ = torchkiln.quantize(rows(device, dtype, shape).args[0])
    return Sample("bench", (data, scale))


def both(x: Tensor) -> Tensors:
    """The casts of a matrix and of the transposed one."""
    return *cast(x), *cast(x.T.contiguous())


def squares(x: Tensor) -> Tensors:
    """The cast in blocks of 128 x 128 elements, also transposed."""
    tiles = x.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK)).transpose(1, 2).flatten(2)
    data, scale = cast_to(tiles, tiles.abs().amax(-1, keepdim=True))
    data = data.unflatten(2, (BLOCK, BLOCK)).transpose(1, 2).reshape(x.shape)
    return data, scale, data.T.contiguous(), scale.T.contiguous()


def turned(data: Tensor, scale: Tensor) -> Tensors:
    """The transposed matrix in E4M3, by way of floating point."""
    return cast((data.float() * scale.repeat_interleave(BLOCK, 1)).T.contiguous())


def with_sum(norm: Callable[..., Tensor]) -> Callable[..., Tensors]:
    """The cast of the norm of a sum, and the sum."""

    def function(x: Tensor, residual: Tensor, *rest: Any) -> Tensors:
        total = x + residual
        return *cast(norm(total, *rest)), total

    return function


def swiglu(packed: Tensor) -> Tensor:
    """Gate and up from the halves of a matrix, with silu."""
    gate, up = packed.chunk(2, -1)
    return F.silu(gate) * up


def geglu(packed: Tensor) -> Tensor:
    """Gate and up from the halves of a matrix, with gelu."""
    gate, up = packed.chunk(2, -1)
    return F.gelu(gate) * up


def swiglu_backward(grad: Tensor, packed: Tensor) -> Tensors:
    """The casts of the gradient of both halves."""
    gate, up = packed.chunk(2, -1)
    slope = torch.ops.aten.silu_backward(grad * up, gate)
    return both(torch.cat((slope, grad * F.silu(gate)), -1))


OVERLOADS = {
    **dict.fromkeys(("swiglu_fp8", "geglu_fp8"), "_gated_fp8"),
    "swiglu_fp8_backward": "_gated_fp8_backward",
}
"""The ops in ``torch.ops`` that have another name."""


def spec(
    name: str,
    op: Callable[..., Any],
    composite: Callable[..., Any],
    bench: Callable[[torch.device, torch.dtype, Shape], Sample],
    shapes: tuple[Shape, ...] = ((16384, 4096),),
) -> OpSpec:
    """The spec of an op, by torch's functions for it."""
    return OpSpec(
        op=lambda *given: flat(op(*given)),
        name=name,
        overload=getattr(torch.ops.torchkiln, OVERLOADS.get(name, name)).default,
        reference=composite,
        composite=composite,
        magnitude=composite,
        inputs=lambda device, dtype: iter([bench(device, dtype, (BLOCK, BLOCK))]),
        differentiable=(),
        dtypes=DTYPES,
        bench=bench,
        bench_shapes=shapes,
        large=None,
    )


HIDDEN = ((16384, 14336),)
GRADIENT = torch.ops.torchkiln._gated_fp8_backward
SPECS = (
    spec("quantize", torchkiln.quantize, cast, rows),
    spec("quantize_both", torchkiln.quantize_both, both, rows),
    spec("quantize_weight", lambda x: tuple(torchkiln.quantize_weight(x)), squares, rows),
    spec("transpose_quantized", torch.ops.torchkiln.transpose_quantized, turned, quantized),
    *(
        spec(
            f"{name}_fp8",
            getattr(torchkiln, f"{name}_fp8"),
            lambda *given, norm=norm: cast(norm(*given)),
            normed(residual=False, bias=norm is F.layer_norm),
        )
        for name, norm in (("rms_norm", F.rms_norm), ("layer_norm", F.layer_norm))
    ),
    *(
        spec(
            f"add_{name}_fp8",
            getattr(torchkiln, f"add_{name}_fp8"),
            with_sum(norm),
            normed(residual=True, bias=norm is F.layer_norm),
        )
        for name, norm in (("rms_norm", F.rms_norm), ("layer_norm", F.layer_norm))
    ),
    spec("swiglu_fp8", torchkiln.swiglu_fp8, lambda x: cast(swiglu(x)), packed, HIDDEN),
    spec("geglu_fp8", torchkiln.geglu_fp8, lambda x: cast(geglu(x)), packed, HIDDEN),
    spec(
        "swiglu_fp8_backward",
        lambda grad, packed: GRADIENT(grad, packed, "silu"),
        swiglu_backward,
        with_gradient,
        HIDDEN,
    ),
)
"""The ops by name; ``swiglu_fp8_backward`` is the backward of the gate in ``gated_linear_fp8``."""
