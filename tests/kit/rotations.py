"""Rotary position embeddings as models of transformers compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_neighbours(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def as_llama(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def as_gpt_neox(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    size = cos.shape[-1]
    q, q_pass = q[..., :size], q[..., size:]
    k, k_pass = k[..., :size], k[..., size:]
    q, k = as_llama(q, k, cos, sin)
    return torch.cat([q, q_pass], dim=-1), torch.cat([k, k_pass], dim=-1)


def as_cohere(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    q, k, cos, sin = q.float(), k.float(), cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = q * cos + rotate_neighbours(q) * sin, k * cos + rotate_neighbours(k) * sin
    return q.to(dtype), k.to(dtype)


def as_glm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1).unsqueeze(1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1).unsqueeze(1)
    return q * cos + rotate_neighbours(q) * sin, k * cos + rotate_neighbours(k) * sin


def of_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    a, b = q.chunk(2, -1)
    c, d = k.chunk(2, -1)
    q = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return q, torch.cat([c * cos - d * sin, d * cos + c * sin], -1)


FUNCTIONS: dict[Callable[..., Any], dict[tuple[int, int], tuple[int, bool, str, bool, bool]]] = {
    as_llama: {
        (4, 3): (-3, False, "halves", False, False),
        (4, 2): (-2, False, "halves", False, False),
        (3, 2): (-2, False, "halves", False, False),
    },
    as_gpt_neox: {
        (4, 3): (-3, False, "halves", True, True),
        (4, 2): (-2, False, "halves", True, True),
        (3, 2): (-2, False, "halves", True, True),
    },
    as_cohere: {
        (4, 3): (-3, True, "neighbours", False, False),
        (4, 2): (-2, True, "neighbours", False, False),
        (3, 2): (-2, True, "neighbours", False, False),
    },
    as_glm: {
        (4, 3): (-3, True, "first", False, False),
        (4, 2): (-2, True, "first", False, False),
        (3, 2): (-2, True, "first", False, False),
    },
    of_pairs: {
        (4, 2): (-3, False, "pairs", False, True),
        (3, 2): (-3, False, "pairs", False, True),
    },
}
