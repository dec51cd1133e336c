"""Attention with a packed projection."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchkiln.nn.checks import check_eps, check_p, check_precision, check_unquantized
from torchkiln.nn.kv_cache import KVCache
from torchkiln.nn.norm import RMSNorm
from torchkiln.nn.quantize import LinearFP8
from torchkiln.ops.quantize import Quantized
from torchkiln.ops.rope import qkv_norm_rope
from torchkiln.typing import Device, Precision


class Attention(nn.Module):
    """``softmax(q @ k.T * scale + mask) @ v @ out.weight.T``, with one product for q, k and v.

    :func:`torchkiln.qkv_norm_rope` splits the product, normalizes the heads and rotates them, and
    :func:`torch.nn.functional.scaled_dot_product_attention` reads the results without a copy. It
    chooses its kernel; :func:`torchkiln.explain` reports which.

    Args:
        dim: size of the last dimension of the input and the output.
        num_heads: heads of the queries.
        num_kv_heads: heads of the keys and of the values, a divisor of ``num_heads``; None for
            ``num_heads``.
        head_dim: elements of a head; None for ``dim // num_heads``.
        bias: whether the projections have a bias.
        out_bias: whether the last projection has a bias; None for ``bias``.
        qk_norm: ``"head"`` for an RMS norm of each head of the queries and the keys, with the
            parameters ``q_norm.weight`` and ``k_norm.weight``; ``"all"`` for one of all heads of
            the queries and one of all heads of the keys; None for no norm.
        eps: of these norms.
        offset: a number that is added to the weights of these norms.
        causal: whether a token attends to itself and earlier tokens only.
        window: the number of tokens that a token attends to, itself included; None for all. It is
            applied as a mask, and needs ``causal``.
        dropout: the probability that an attention weight is dropped in training.
        scale: a factor of the products of queries and keys; None for ``head_dim**-0.5``.
        interleaved: as for :func:`torchkiln.rope`.
        rotary_dim: as for :func:`torchkiln.rope`.
        precision: ``"fp8"`` for projections that are :class:`LinearFP8`.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        x and output ``[batch, tokens, dim]``; cos and sin ``[tokens, pairs]`` or
        ``[batch, tokens, pairs]``, with positions tables ``[rows, pairs]``; mask broadcasts to
        ``[batch, heads, tokens, keys]``; positions ``[tokens]`` or ``[batch, tokens]``.
    """

    precision: Precision | None = None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: Literal["head", "all"] | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        precision: Precision | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_settings(dim, num_heads, num_kv_heads, head_dim, qk_norm, causal, window)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.causal, self.window, self.scale = causal, window, scale
        self.dropout = check_p("nn.Attention", dropout)
        self.interleaved, self.rotary_dim = interleaved, rotary_dim
        self.qk_norm, self.offset = qk_norm, offset
        self.eps = check_eps("nn.Attention", eps)
        columns = (num_heads + 2 * num_kv_heads) * self.head_dim
        last = bias if out_bias is None else out_bias
        self.precision = check_precision("nn.Attention", precision)
        layer = nn.Linear if precision is None else LinearFP8
        self.qkv = layer(dim, columns, bias, device=device, dtype=dtype)
        self.out = layer(num_heads * self.head_dim, dim, last, device=device, dtype=dtype)
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            self.q_norm, self.k_norm = (
                RMSNorm(count * self.head_dim, eps, True, device, dtype, offset=offset)
                for count in ((num_heads, num_kv_heads) if qk_norm == "all" else (1, 1))
            )

    def forward(
        self,
        x: Tensor | Quantized,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attends from each token of ``x``.

        Args:
            x: the tokens; with ``precision="fp8"`` also in float8_e4m3fn, as by
                :func:`torchkiln.rms_norm_fp8`.
            cos: cosines of the rotation; None for no rotation.
            sin: sines of the rotation.
            mask: True where a key takes part, or numbers that are added to the products, as in
                ``scaled_dot_product_attention``. It applies in addition to ``causal`` and
                ``window``.
            cache: keys and values of earlier tokens; the call adds the tokens of ``x``.
            positions: int64, the places of the tokens in the cache, and the rows of ``cos`` and
                ``sin`` unless these are ``[batch, tokens, pairs]``. With a cache and without
                positions the tokens have the places 0, 1, 2, ..., and only they are attended to.
        """
        tokens = x.data if isinstance(x, Quantized) else x
        if tokens.dim() != 3:
            raise ValueError(
                f"torchkiln.nn.Attention: x: got shape {list(tokens.shape)}, "
                f"expected [batch, tokens, {self.qkv.in_features}]"
            )
        qkv = self.qkv(check_unquantized("nn.Attention", "x", x) if self.precision is None else x)
        if cache is None:
            q, k, v = self.split(qkv, cos, sin, positions)
        else:
            q, k, v = self.split_into(cache, qkv, cos, sin, positions)
        p = self.dropout if self.training else 0.0
        places = None if cache is None else positions
        causal = self.causal and mask is None and self.window is None and places is None
        if not causal:
            mask = self.visible(mask, q, k.shape[-2], cache, places)
        grouped = self.num_heads != self.num_kv_heads
        alone = grouped and tokens.shape[1] == 1 and (mask is None or mask.dim() == 2)
        alone = alone and not has_grouped_kernel(tokens.device)
        if alone:  # one token: the query heads of a group become the token dimension
            q = q.view(q.shape[0], self.num_kv_heads, -1, self.head_dim)
            grouped = causal = False
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, p, causal, scale=self.scale, enable_gqa=grouped
        )
        if alone:
            mixed = mixed.reshape(tokens.shape[0], self.num_heads, 1, self.head_dim)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out

    def split(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        positions: Tensor | None,
        cache: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits a projection into queries, keys, values ``[batch, heads, tokens, head_dim]``."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if cos is not None and sin is not None:
            return qkv_norm_rope(
                qkv,
                cos,
                sin,
                None if q_norm is None else q_norm.weight,
                None if k_norm is None else k_norm.weight,
                self.num_heads,
                self.num_kv_heads,
                eps=self.eps,
                norm=self.qk_norm or "none",
                offset=self.offset,
                interleaved=self.interleaved,
                positions=positions,
                rotary_dim=self.rotary_dim,
                cache=cache,
            )
        if cos is not None or sin is not None:
            raise ValueError("torchkiln.nn.Attention: sin: got one of cos and sin, expected both")
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = qkv.split([count * self.head_dim for count in sizes], -1)
        if q_norm is not None and k_norm is not None:
            q, k = (
                norm(x.unflatten(-1, (-1, norm.weight.numel()))).flatten(-2)
                for norm, x in ((q_norm, q), (k_norm, k))
            )
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def split_into(
        self,
        cache: KVCache,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Writes the keys and values of a projection into the cache.

        Returns the queries of the projection, and the keys and values of the cache.
        """
        tokens = qkv.shape[1]
        if cos is not None and cache.keys.dtype == qkv.dtype:
            cache.check_length(tokens)
            q, *_ = self.split(qkv, cos, sin, positions, (cache.keys, cache.values))
        else:
            rows = positions if cos is None or cos.dim() == 2 else None
            q, k, v = self.split(qkv, cos, sin, rows)
            cache.write(k, v, positions)
        places = slice(tokens if positions is None else None)
        k, v = (buffer[:, :, places].to(q.dtype) for buffer in (cache.keys, cache.values))
        return q, k, v

    def visible(
        self,
        mask: Tensor | None,
        q: Tensor,
        keys: int,
        cache: KVCache | None,
        positions: Tensor | None,
    ) -> Tensor | None:
        """The mask of the call, with ``causal`` and ``window``; keys have places 0, 1, 2, ..."""
        plain = self.causal and self.window is None and mask is None
        if plain and cache is not None and positions is not None:
            return cache.mask(positions).to(q.dtype)
        if not self.causal and positions is None:
            return mask
        places = torch.arange(q.shape[-2], device=q.device) if positions is None else positions
        last = places if self.causal else places.amax(-1, keepdim=True).expand_as(places)
        key = torch.arange(keys, device=q.device)
        seen = key <= last[..., None]
        if self.window is not None:
            seen = seen & (key > places[..., None] - self.window)
        if seen.dim() == 3:
            seen = seen[:, None]  # a dimension for the heads
        if mask is None:
            return seen
        return seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        words = f"{heads}, head_dim={self.head_dim}, causal={self.causal}, window={self.window}"
        return f"{words}, qk_norm={self.qk_norm!r}"


def has_grouped_kernel(device: torch.device) -> bool:
    """Whether attention with a mask reads the keys of a group of heads once.

    cuDNN's kernel does. Torch prefers it from compute capability 9.0 on. Other kernels repeat the
    keys.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def check_settings(
    dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int | None,
    qk_norm: Literal["head", "all"] | None,
    causal: bool,
    window: int | None,
) -> None:
    """Refuses settings of :class:`Attention` that do not fit together."""
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"torchkiln.nn.Attention: num_kv_heads: got {num_kv_heads}, expected a divisor of "
            f"num_heads = {num_heads}"
        )
    if head_dim is None and dim % num_heads:
        raise ValueError(
            f"torchkiln.nn.Attention: num_heads: got {num_heads}, expected a divisor of dim = "
            f"{dim}; for other sizes pass head_dim"
        )
    if qk_norm not in (None, "head", "all"):
        raise ValueError(
            f"torchkiln.nn.Attention: qk_norm: got {qk_norm!r}, expected 'head', 'all' or None"
        )
    if window is not None and (window < 1 or not causal):
        raise ValueError(
            f"torchkiln.nn.Attention: window: got {window} with causal={causal}, "
            "expected a positive number with causal=True"
        )
