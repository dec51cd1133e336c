"""The attention of torch.nn, with the same arguments, parameters and results."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchkiln.ops.matmul import linear


class MultiheadAttention(nn.MultiheadAttention):
    """``softmax(q @ k.T / sqrt(head_dim) + mask) @ v @ out_proj.weight.T + out_proj.bias``.

    A :class:`torch.nn.MultiheadAttention`. With ``need_weights=False`` the queries, keys and values
    are views of one product, which ``scaled_dot_product_attention`` reads without a copy, in
    training, too. Torch's forward is called for attention weights, ``add_bias_kv``,
    ``add_zero_attn`` and nested tensors.

    The arguments are those of torch's module.

    Shape:
        query and output ``[targets, batch, embed_dim]``, key ``[sources, batch, kdim]``, value
        ``[sources, batch, vdim]``; with ``batch_first`` ``[batch, targets, embed_dim]`` and so on,
        or all without the batch. Weights ``[batch, targets, sources]``.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from ``query`` to ``key`` and ``value``; masks are True where a key is hidden."""
        if need_weights or not self._is_fused(query, key, value, key_padding_mask, attn_mask):
            return super().forward(
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "torchkiln.nn.MultiheadAttention: attn_mask: got None with is_causal=True. "
                "Need attn_mask if specifying the is_causal hint."
            )
        batched = query.dim() == 3
        tokens_dim = 1 if self.batch_first and batched else 0
        parts = self._project(query, key, value)
        heads = [p.unflatten(-1, (self.num_heads, self.head_dim)) for p in parts]
        if batched:
            order = (0, 2, 1, 3) if tokens_dim else (1, 2, 0, 3)
            q, k, v = (p.permute(order) for p in heads)
        else:
            q, k, v = (p.transpose(0, 1).unsqueeze(0) for p in heads)
        alone = is_causal and key_padding_mask is None
        mask = None if alone else self._mask(query, q.shape[0], key_padding_mask, attn_mask)
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, mask, p, alone)
        if batched:
            mixed = mixed.permute((0, 2, 1, 3) if tokens_dim else (2, 0, 1, 3))
        else:
            mixed = mixed.squeeze(0).transpose(0, 1)
        return linear(mixed.flatten(-2), self.out_proj.weight, self.out_proj.bias), None

    def _is_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        mask: Tensor | None,
    ) -> bool:
        """Whether the call is computed here; torch's forward computes or refuses all others."""
        batched = query.dim() == 3
        if (
            query.is_nested
            or query.dim() not in (2, 3)
            or not query.dim() == key.dim() == value.dim()
        ):
            return False
        first = self.batch_first and batched
        targets, sources = (t.shape[1 if first else 0] for t in (query, key))
        batch = query.shape[0 if first else 1] if batched else 1
        pairs = (targets, sources)
        return (
            self.bias_k is None
            and self.bias_v is None
            and not self.add_zero_attn
            and not key.is_nested
            and not torch.overrides.has_torch_function((query, key, value))
            and query.shape[-1] == self.embed_dim
            and key.shape[-1] == self.kdim
            and value.shape[-1] == self.vdim
            and key.shape[:-1] == value.shape[:-1]
            and (not batched or key.shape[0 if first else 1] == batch)
            and (mask is None or mask.shape in (pairs, (batch * self.num_heads, *pairs)))
            and (padding is None or padding.shape == ((batch, sources) if batched else (sources,)))
        )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, from as few products as possible."""
        bias, size = cast("Tensor | None", self.in_proj_bias), self.embed_dim
        if not self._qkv_same_embed_dim:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None, None, None) if bias is None else bias.chunk(3)
            inputs = (query, key, value)
            return tuple(linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
        weight = self.in_proj_weight
        if query is key and key is value:
            return linear(query, weight, bias).chunk(3, -1)
        if key is value:
            sizes = [size, 2 * size]
            w, w_kv = weight.split(sizes)
            b, b_kv = (None, None) if bias is None else bias.split(sizes)
            return (linear(query, w, b), *linear(key, w_kv, b_kv).chunk(2, -1))
        biases = (None, None, None) if bias is None else bias.chunk(3)
        inputs = (query, key, value)
        return tuple(
            linear(x, w, b) for x, w, b in zip(inputs, weight.chunk(3), biases, strict=True)
        )

    def _mask(
        self, query: Tensor, batch: int, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """Both masks as numbers that are added, ``[batch or 1, heads or 1, targets, sources]``."""
        padding, mask = canonical_masks(query, padding, mask, "key_padding_mask", "attn_mask")
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (batch, self.num_heads))
        if padding is not None:
            padding = padding.view(batch, 1, 1, -1)
            return padding if mask is None else mask + padding
        return mask


def canonical_masks(
    x: Tensor, padding: Tensor | None, mask: Tensor | None, padding_name: str, mask_name: str
) -> tuple[Tensor | None, Tensor | None]:
    """Both masks as numbers of the dtype of ``x``, by torch's rules and with its errors."""
    padding = F._canonical_mask(padding, padding_name, F._none_or_dtype(mask), mask_name, x.dtype)
    return padding, F._canonical_mask(mask, mask_name, None, "", x.dtype, False)
