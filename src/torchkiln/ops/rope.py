"""Rotary position embedding of queries and keys."""

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._traced import check_no_gradient
from torchkiln.ops.eager import eager


class RopeOptions(TypedDict, total=False):
    """Options of :func:`rope`."""

    interleaved: bool
    positions: Tensor | None
    rotary_dim: int | None
    heads_dim: int
    inverse: bool


@overload
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Unpack[RopeOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def rope(
    q: Tensor, k: None, cos: Tensor, sin: Tensor, **options: Unpack[RopeOptions]
) -> tuple[Tensor, None]: ...
@overload
def rope(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Unpack[RopeOptions]
) -> tuple[Tensor, Tensor | None]: ...
@eager(_C.rope)
def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    heads_dim: int = -3,
    inverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns ``q`` and ``k`` with each pair (a, b) as ``(a cos - b sin, b cos + a sin)``.

    One kernel rotates both tensors. Strided views, such as the parts of a packed projection, are
    read without a copy if the elements of a head are adjacent; results have no gaps and keep the
    order of heads and tokens in memory. Half precision is computed in float32 and rounded once. The
    gradient is the rotation by the negative angle, so only ``cos``, ``sin`` and ``positions`` are
    saved. If ``cos`` or ``sin`` requires a gradient, torch's own ops compute the result.

    Args:
        q: ``[batch, heads, tokens, head_dim]`` or ``[heads, tokens, head_dim]``; float32, float64,
            float16 or bfloat16.
        k: as ``q``, with any number of heads. With None the second result is None.
        cos: ``[tokens, pairs]`` or ``[batch, tokens, pairs]``: a factor for each pair, or
            ``2 * pairs`` columns with each factor twice, of which the first is read. With
            ``positions`` it is a table ``[rows, pairs]``. Of the dtype of ``q``, or float32 if
            ``q`` has half precision.
        sin: of the shape and dtype of ``cos``.
        interleaved: whether the pairs are elements ``(2i, 2i + 1)``, as in GPT-J, and not
            ``(i, i + pairs)``, as in GPT-NeoX and Llama. Doubled factors are then in pairs, too.
        positions: ``[tokens]`` or ``[batch, tokens]``, int64 or int32: the rows of ``cos`` and
            ``sin`` for each token. A position outside of the table gives NaN.
        rotary_dim: how many elements at the start of each head are rotated, an even number; None
            for all. The other elements are copied.
        heads_dim: -3, or -2 for ``[..., tokens, heads, head_dim]``. A number from the front, such
            as ``unsqueeze_dim=1`` of Hugging Face, is accepted, too.
        inverse: whether to rotate by the negative angles.
    """
    turned, other = torch.ops.torchkiln.rope.default(
        q,
        k,
        cos,
        sin,
        interleaved=interleaved,
        positions=positions,
        rotary_dim=rotary_dim,
        heads_dim=heads_dim,
        inverse=inverse,
    )
    return turned, None if k is None else other


@eager(_C.qkv_norm_rope, beside=("cache",))
def qkv_norm_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    *,
    eps: float = 1e-6,
    norm: Literal["head", "all", "none"] = "head",
    offset: float = 0.0,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    cache: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``(rope(norm(q)), rope(norm(k)), v)`` of a packed projection, in one pass.

    The norm is ``x / sqrt(mean(x**2) + eps) * (offset + weight)``, with a mean over each head, or
    over all heads of the queries and all heads of the keys. Norm and rotation are computed in
    float32 (float64 for float64) and rounded once; models of Hugging Face round between the two.
    Attention reads the results without a copy: ``[batch, heads, tokens, head_dim]`` with the heads
    of a token adjacent in memory. Values are copied, so that backward writes the gradient of the
    whole projection in one pass. Only the arguments are saved for backward. The gradients of the
    weights are bitwise reproducible. If ``cos`` or ``sin`` requires a gradient, torch's own ops
    compute the gradients.

    Args:
        qkv: ``[batch, tokens, (num_heads + 2 * num_kv_heads) * head_dim]`` or without the batch:
            the heads of the queries, the keys, the values; float32, float64, float16 or bfloat16; a
            head has at most 1024 elements.
        cos: as for :func:`rope`.
        sin: as for :func:`rope`.
        q_weight: ``[head_dim]``, or ``[num_heads * head_dim]`` for a norm of all heads, of the
            dtype of ``qkv``, or float32 if ``qkv`` has half precision; None for ones, without
            ``offset``.
        k_weight: ``[head_dim]`` or ``[num_kv_heads * head_dim]``, of the dtype of ``q_weight``.
        num_heads: heads of the queries.
        num_kv_heads: heads of the keys, and of the values.
        eps: a number of at least 0.
        norm: ``"head"``; ``"all"`` for a mean over all heads of the queries and one over those of
            the keys, as in OLMo 2; ``"none"`` for the rotation alone.
        offset: a number that is added to the weights: 1.0 for models that store ``weight - 1``.
        interleaved: as for :func:`rope`.
        positions: as for :func:`rope`.
        rotary_dim: as for :func:`rope`.
        cache: keys and values ``[batch, num_kv_heads, length, head_dim]`` of the dtype of ``qkv``,
            with adjacent elements of a head. The kernel writes the keys and values of ``qkv`` at
            ``positions``, which must differ within a sequence, or at 0, 1, 2, ... if these are
            None. The results are ``(rope(norm(q)), *cache)``. A token whose position is outside of
            the cache is not written. If ``cos`` and ``sin`` are ``[batch, tokens, pairs]``,
            positions do not index them. For inference: the call has no gradient.
    """
    if cache is not None:
        keys, values = cache
        check_no_gradient("qkv_norm_rope", "cache", qkv, cos, sin, q_weight, k_weight, keys, values)
        q = torch.ops.torchkiln._qkv_norm_rope_cache.default(
            qkv,
            cos,
            sin,
            q_weight,
            k_weight,
            num_heads,
            num_kv_heads,
            eps,
            norm,
            offset,
            interleaved,
            positions,
            rotary_dim,
            keys,
            values,
        )
        return q, keys, values
    return torch.ops.torchkiln.qkv_norm_rope.default(
        qkv,
        cos,
        sin,
        q_weight,
        k_weight,
        num_heads,
        num_kv_heads,
        eps=eps,
        norm=norm,
        offset=offset,
        interleaved=interleaved,
        positions=positions,
        rotary_dim=rotary_dim,
    )
