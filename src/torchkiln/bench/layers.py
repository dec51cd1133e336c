"""Specs of functions that call several ops, for ``torchkiln bench --specs torchkiln.bench.layers``.

Tests of the ops check their results; these specs are only for timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from torchkiln.testing import OpSpec, Sample, Traffic

PIXELS = 28
"""Height and width of the images."""
TOKENS, HEAD = 2048, 128
"""Maximum number of tokens per sequence, and of elements per head."""
CACHED = 256
"""Tokens of a sequence in a cache."""


def convolved(
    x: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    bn_weight: Tensor,
    bn_bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None = None,
    *,
    padding: int,
    training: bool = False,
) -> Tensor:
    """Torch's convolution, batch norm, sum and relu."""
    y = F.conv2d(x, conv_weight, conv_bias, padding=padding)
    y = F.batch_norm(y, running_mean, running_var, bn_weight, bn_bias, training).to(x.dtype)
    return torch.relu(y if residual is None else y + residual)


def convolution(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], kernel: int = 3
) -> Sample:
    """Images with adjacent channels in eval mode, with float32 statistics."""
    pixels, channels = shape
    x = torch.randn(max(pixels // PIXELS**2, 1), PIXELS, PIXELS, channels, device=device)
    weight = torch.randn(channels, channels, kernel, kernel, device=device).to(dtype)
    weight = weight.contiguous(memory_format=torch.channels_last)
    owned = torch.promote_types(dtype, torch.float32)
    vectors = torch.rand(4, channels, device=device, dtype=owned) + 0.5
    parameter = nn.Parameter(weight, requires_grad=False)  # batch norm is folded into parameters
    return Sample(
        "bench", (x.to(dtype).movedim(-1, 1), parameter, None, *vectors), {"padding": kernel // 2}
    )


def convolutions(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    """Variants: a kernel of one element, a residual, and training."""
    yield "1 x 1", convolution(device, dtype, shape, kernel=1)
    usual = convolution(device, dtype, shape)
    yield "residual", Sample("bench", (*usual.args, torch.randn_like(usual.args[0])), usual.kwargs)
    training = usual.substitute(5, None).substitute(6, None)
    yield "training", Sample("bench", training.args, {"padding": 1, "training": True})


def convolution_traffic(sample: Sample) -> Traffic:
    """Traffic that reads x, residual and weight and writes y; a product and a sum per weight."""
    x, weight = sample.args[:2]
    tensors = [x, x, weight, *sample.args[7:]]
    return Traffic(sum(t.nbytes for t in tensors), 2 * x.numel() * weight[0].numel())


def rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation of pairs whose elements are half a head apart."""
    first, second = t.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(t.dtype)


def attended(x: Tensor, layer: torchkiln.nn.Attention, cos: Tensor, sin: Tensor) -> Tensor:
    """The layer's attention, computed with torch's functions."""
    q, k, v = (
        layer.qkv(x).unflatten(-1, (3, layer.num_heads, layer.head_dim)).permute(2, 0, 3, 1, 4)
    )
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found: Tensor = layer.out(mixed.transpose(1, 2).flatten(2))
    return found


def attend(x: Tensor, layer: torchkiln.nn.Attention, cos: Tensor, sin: Tensor) -> Any:
    """The layer's forward."""
    return layer(x, cos, sin)


def attention(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """Sequences of up to 2048 tokens, causal, with heads of up to 128 elements and a rotation."""
    rows, columns = shape
    tokens, head = min(rows, TOKENS), min(columns, HEAD)
    layer = torchkiln.nn.Attention(
        columns, columns // head, head_dim=head, device=device, dtype=dtype
    )
    x = torch.randn(rows // tokens, tokens, columns, device=device, dtype=dtype)
    angles = torch.outer(torch.arange(tokens), 1e4 ** -torch.linspace(0, 1, head // 2)).to(device)
    return Sample("bench", (x, layer.requires_grad_(False), angles.cos(), angles.sin()))


def attention_traffic(sample: Sample) -> Traffic:
    """Reads x and the weights, writes y. A causal mask halves the products between tokens."""
    x, layer = sample.args[:2]
    weights = [layer.qkv.weight, layer.out.weight]
    products = 2 * x.shape[0] * x.shape[1] * sum(w.numel() for w in weights)
    between = 2 * x.numel() * x.shape[1]
    return Traffic(2 * x.nbytes + sum(w.nbytes for w in weights), products + between)


def attention_backward_traffic(sample: Sample) -> Traffic:
    """The projections count as in forward, the products between tokens 2.5 times as much.

    The weights have no gradients.
    """
    x = sample.args[0]
    forward = attention_traffic(sample)
    return Traffic(forward.bytes + x.nbytes, forward.operations + 3 * x.numel() * x.shape[1])


def copied(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    heads: int,
    kv_heads: int,
    *,
    positions: Tensor,
    cache: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's norms, the rotation, and copies of keys and values into the cache."""
    rows = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = rows.split([heads, kv_heads, kv_heads], 1)
    q, k = (
        rotated(F.rms_norm(x, x.shape[-1:], weight, 1e-6), cos[positions], sin[positions])
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    keys, values = cache
    return q, keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)


def step(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A new token of each sequence, with 4 query heads per key head."""
    rows, columns = shape
    head = min(columns, HEAD)
    heads = columns // head
    kv_heads = max(heads // 4, 1)
    qkv = torch.randn(rows, 1, (heads + 2 * kv_heads) * head, device=device, dtype=dtype)
    angles = torch.outer(torch.arange(CACHED), 1e4 ** -torch.linspace(0, 1, head // 2)).to(device)
    wide = torch.promote_types(dtype, torch.float32)
    owned = [torch.ones(head, device=device, dtype=dtype) for _ in range(2)]
    keys, values = torch.zeros(2, rows, kv_heads, CACHED, head, device=device, dtype=dtype)
    return Sample(
        "bench",
        (qkv, angles.cos().to(wide), angles.sin().to(wide), *owned, heads, kv_heads),
        {"positions": torch.tensor([CACHED // 2], device=device), "cache": (keys, values)},
    )


def step_traffic(sample: Sample) -> Traffic:
    """Reads the projection, writes queries, keys and values."""
    qkv = sample.args[0]
    return Traffic(2 * qkv.nbytes, 6 * qkv.numel())


CONV_BN_ACT = OpSpec(
    op=torchkiln.conv_bn_act,
    name="conv_bn_act",
    overload=torch.ops.torchkiln.bn_act.default,
    reference=convolved,
    magnitude=convolved,
    inputs=lambda device, dtype: iter([convolution(device, dtype, (2 * PIXELS**2, 8))]),
    differentiable=(),
    bench=convolution,
    bench_variants=convolutions,
    bench_shapes=((200704, 64), (200704, 256), (50176, 512)),
    large=None,
    traffic=convolution_traffic,
)
ATTENTION = OpSpec(
    op=attend,
    name="attention",
    overload=torch.ops.torchkiln.qkv_norm_rope.default,
    reference=attended,
    magnitude=attended,
    inputs=lambda device, dtype: iter([attention(device, dtype, (32, 16))]),
    differentiable=(0,),
    bench=attention,
    bench_shapes=((8192, 2048), (8192, 4096)),
    large=None,
    traffic=attention_traffic,
    backward_traffic=attention_backward_traffic,
)
STEP = OpSpec(
    op=torchkiln.qkv_norm_rope,
    name="qkv_norm_rope_cache",
    overload=torch.ops.torchkiln._qkv_norm_rope_cache.default,
    reference=copied,
    magnitude=copied,
    inputs=lambda device, dtype: iter([step(device, dtype, (4, 16))]),
    differentiable=(),
    bench=step,
    bench_shapes=((8, 4096), (64, 4096), (512, 4096)),
    large=None,
    traffic=step_traffic,
)
SPECS = (CONV_BN_ACT, ATTENTION, STEP)
