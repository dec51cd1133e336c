"""The block of a decoder: attention and a feed-forward layer, each after a norm."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchkiln.nn.attention import Attention
from torchkiln.nn.kv_cache import KVCache
from torchkiln.nn.matmul import MLP, GatedMLP
from torchkiln.nn.norm import LayerNorm, RMSNorm
from torchkiln.nn.plain import has_hooks
from torchkiln.nn.quantize import LinearFP8
from torchkiln.ops.dropout import dropout_add
from torchkiln.ops.norm import (
    add_layer_norm,
    add_layer_norm_fp8,
    add_rms_norm,
    add_rms_norm_fp8,
    layer_norm,
    layer_norm_fp8,
    rms_norm_fp8,
)
from torchkiln.ops.quantize import Quantized
from torchkiln.typing import Activation, Device, Precision, Rounding, Saved


class TransformerBlock(nn.Module):
    """``t = x + residual; u = t + attention(norm(t)); (mlp(norm(u)), u)``.

    The sum of the two results is the output of the block. Pass both to the next block, which
    computes sum and first norm in one pass; after the last block add them.

    The defaults are the form of Llama. GPT-2: ``norm="layer", bias=True, gated=False,
    act="gelu_tanh"``, without cos and sin. Qwen3: ``qk_norm="head"``. Gemma: ``offset=1.0,
    act="gelu_tanh"``; Gemma 2 and 3 also ``post_norms=True``.

    Args:
        dim: size of the last dimension of the input.
        hidden_features: of the feed-forward layer; None for ``4 * dim``.
        norm: ``"rms"`` or ``"layer"``.
        eps: of all norms.
        offset: a number that is added to the weights of all norms.
        round: of all norms except norms of heads, as for :func:`torchkiln.layer_norm`.
        bias: whether projections and layer norms have a bias.
        gated: whether the feed-forward layer is a :class:`GatedMLP` and not a :class:`MLP`.
        act: the activation of the feed-forward layer.
        post_norms: whether the results of attention and feed-forward layer are normalized, too.
        dropout: the probability that an attention weight, or an element of the results of attention
            and feed-forward layer, is dropped in training.
        precision: ``"fp8"`` for products in float8_e4m3fn, as by :class:`LinearFP8`, of all four
            projections; None for the precision of the parameters.
        device: of the parameters.
        dtype: of the parameters.

    ``save`` is that of :func:`torchkiln.mlp`, the other arguments are those of :class:`Attention`.

    Shape:
        x, residual and both outputs ``[batch, tokens, dim]``; others as for :class:`Attention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        hidden_features: int | None = None,
        *,
        norm: Literal["rms", "layer"] = "rms",
        eps: float = 1e-6,
        offset: float = 0.0,
        round: Rounding = "once",
        bias: bool = False,
        gated: bool = True,
        act: Activation = "silu",
        post_norms: bool = False,
        qk_norm: Literal["head", "all"] | None = None,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        save: Saved = "preact",
        precision: Precision | None = None,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if norm not in ("rms", "layer"):
            raise ValueError(
                f"torchkiln.nn.TransformerBlock: norm: got {norm!r}, expected 'rms' or 'layer'"
            )

        def make_norm() -> LayerNorm | RMSNorm:
            if norm == "rms":
                return RMSNorm(dim, eps, True, device, dtype, offset=offset, round=round)
            return LayerNorm(dim, eps, True, bias, device, dtype, offset=offset, round=round)

        self.dropout = dropout
        self.attention_norm = make_norm()
        self.attention = Attention(
            dim,
            num_heads,
            num_kv_heads,
            head_dim,
            bias=bias,
            qk_norm=qk_norm,
            eps=eps,
            offset=offset,
            causal=causal,
            window=window,
            dropout=dropout,
            scale=scale,
            interleaved=interleaved,
            rotary_dim=rotary_dim,
            precision=precision,
            device=device,
            dtype=dtype,
        )
        self.mlp_norm = make_norm()
        layer: Any = GatedMLP if gated else MLP
        size = 4 * dim if hidden_features is None else hidden_features
        options = {"act": act, "save": save, "precision": precision}
        self.mlp = layer(dim, size, bias=bias, **options, device=device, dtype=dtype)
        self.attention_post_norm = make_norm() if post_norms else None
        self.mlp_post_norm = make_norm() if post_norms else None

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The result of the feed-forward layer, and the residual that must be added to it.

        ``x`` and ``residual`` are the two results of the previous block; for the first block ``x``
        is the embedded tokens and ``residual`` is None. The other arguments are those of
        :meth:`Attention.forward`.
        """
        p = self.dropout if self.training else 0.0
        normed: Tensor | Quantized
        quantized = takes_quantized(self.attention, self.attention_norm, x)
        if residual is None:
            normed, residual = normalized(self.attention_norm, x, quantized=quantized), x
        else:
            normed, residual = add_norm(self.attention_norm, x, residual, quantized=quantized)
        x = self.attention(normed, cos, sin, mask=mask, cache=cache, positions=positions)
        if self.attention_post_norm is not None:
            x = self.attention_post_norm(x)
        quantized = takes_quantized(self.mlp, self.mlp_norm, x)
        normed, residual = add_norm(self.mlp_norm, x, residual, p, quantized=quantized)
        x = self.mlp(normed)
        if self.mlp_post_norm is not None:
            x = self.mlp_post_norm(x)
        return (F.dropout(x, p) if p else x), residual


def takes_quantized(layer: nn.Module, norm: nn.Module, x: Tensor) -> bool:
    """Whether a layer multiplies the norm of x in FP8, and nothing else reads it.

    False under autocast, which cannot change the dtype of a quantised tensor.
    """
    if getattr(layer, "precision", None) is None or torch.is_autocast_enabled(x.device.type):
        return False
    if len(getattr(norm, "normalized_shape", ())) != 1:
        return False
    parts = [layer, layer.qkv] if type(layer) is Attention else [layer]
    if any(has_hooks(part) or "forward" in vars(part) for part in parts):
        return False
    return type(layer) in (MLP, GatedMLP) or type(parts[-1]) is LinearFP8


def add_norm(
    norm: nn.Module, x: Tensor, residual: Tensor, p: float = 0.0, *, quantized: bool = False
) -> tuple[Any, Tensor]:
    """``(norm(total), total)`` with ``total = dropout(x) + residual``, in one pass if p is 0.

    A norm of another class, or with hooks, is called as a module. ``quantized`` is whether other
    norms are written in float8_e4m3fn.
    """
    if p == 0 and not has_hooks(norm):
        if isinstance(norm, RMSNorm) and type(norm) is RMSNorm:
            op: Any = add_rms_norm_fp8 if quantized else add_rms_norm
            return op(x, residual, *settings(norm), **options(norm))
        if isinstance(norm, nn.LayerNorm) and type(norm) in (LayerNorm, nn.LayerNorm):
            op = add_layer_norm_fp8 if quantized else add_layer_norm
            return op(x, residual, *settings(norm), **options(norm))
    total = dropout_add(x, residual, p)
    return normalized(norm, total, quantized=quantized), total


def normalized(norm: nn.Module, x: Tensor, *, quantized: bool = False) -> Any:
    """``norm(x)``; a plain layer norm of torch is computed by :func:`torchkiln.layer_norm`."""
    if has_hooks(norm):
        return norm(x)
    if quantized and type(norm) is RMSNorm:
        return rms_norm_fp8(x, *settings(norm), **options(norm))
    if type(norm) is nn.LayerNorm or (quantized and type(norm) is LayerNorm):
        op: Any = layer_norm_fp8 if quantized else layer_norm
        return op(x, *settings(norm), **options(norm))
    return norm(x)


def settings(norm: nn.LayerNorm | RMSNorm) -> tuple[Any, ...]:
    """The arguments of a norm's op after the tensors that it reads."""
    bias = (norm.bias,) if isinstance(norm, nn.LayerNorm) else ()
    return (norm.normalized_shape, norm.weight, *bias, norm.eps)


def options(norm: nn.Module) -> dict[str, Any]:
    """The keyword arguments of a norm's op, which norms of torch do not have."""
    return {"offset": getattr(norm, "offset", 0.0), "round": getattr(norm, "round", "once")}
