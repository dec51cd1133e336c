"""The transformer layers of torch.nn, with the same arguments, parameters and results."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchkiln.nn.multihead import MultiheadAttention, canonical_masks
from torchkiln.nn.plain import has_hooks
from torchkiln.nn.transformer import add_norm, normalized
from torchkiln.ops.dropout import dropout_add
from torchkiln.ops.matmul import linear, mlp
from torchkiln.typing import Activation, Device


class _Layer(nn.Module):
    """The common part of both layers: the constructor."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        for attention in self.children():
            if type(attention) is nn.MultiheadAttention:
                adopt(attention)


class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """``y = norm1(x + attention(x)); norm2(y + linear2(act(linear1(y))))``.

    A :class:`torch.nn.TransformerEncoderLayer`. Linear layer and activation are one op, in
    training, too. So are dropout and residual sum, or without dropout residual sum and norm.
    Submodules with hooks or of another class are called one by one.

    The arguments are those of torch's module.

    Shape:
        input and output ``[tokens, batch, d_model]``, or as for :class:`MultiheadAttention`.
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Applies the layer to ``src``."""
        if src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        padding, mask = canonical_masks(
            src, src_key_padding_mask, src_mask, "src_key_padding_mask", "src_mask"
        )
        x = normalized(self.norm1, src) if self.norm_first else src
        y = attend(self.self_attn, x, x, padding, mask, is_causal)
        if self.norm_first:
            y, x = add_norm(self.norm2, y, src, rate(self.dropout1))
            return add(feed(self, y), x, rate(self.dropout2))
        x = add_norm(self.norm1, y, x, rate(self.dropout1))[0]
        return add_norm(self.norm2, feed(self, x), x, rate(self.dropout2))[0]


class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """:class:`TransformerEncoderLayer` with attention to the input, then to ``memory``.

    A :class:`torch.nn.TransformerDecoderLayer`, with the same arguments.

    Shape:
        tgt and output ``[targets, batch, d_model]``, memory ``[sources, batch, d_model]``, or as
        for :class:`MultiheadAttention`.
    """

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Applies the layer to ``tgt`` and ``memory``."""
        ours = (tgt_key_padding_mask, tgt_mask, tgt_is_causal)
        theirs = (memory_key_padding_mask, memory_mask, memory_is_causal)
        p1, p2, p3 = rate(self.dropout1), rate(self.dropout2), rate(self.dropout3)
        if self.norm_first:
            y = normalized(self.norm1, tgt)
            y, x = add_norm(self.norm2, attend(self.self_attn, y, y, *ours), tgt, p1)
            y, x = add_norm(self.norm3, attend(self.multihead_attn, y, memory, *theirs), x, p2)
            return add(feed(self, y), x, p3)
        x = add_norm(self.norm1, attend(self.self_attn, tgt, tgt, *ours), tgt, p1)[0]
        x = add_norm(self.norm2, attend(self.multihead_attn, x, memory, *theirs), x, p2)[0]
        return add_norm(self.norm3, feed(self, x), x, p3)[0]


def adopt(attention: nn.MultiheadAttention) -> None:
    """Changes the class of torch's attention to ours, without new parameters or random numbers."""
    attention.__class__ = MultiheadAttention


def attend(
    attention: nn.MultiheadAttention,
    x: Tensor,
    memory: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """The output of attention, without the attention weights."""
    out: Tensor = attention(x, memory, memory, padding, False, mask, is_causal=is_causal)[0]
    return out


def rate(dropout: nn.Dropout) -> float:
    """The probability that an element is dropped; 0 in eval mode."""
    return dropout.p if dropout.training else 0.0


def add(x: Tensor, residual: Tensor, p: float) -> Tensor:
    """``dropout(x) + residual``."""
    return dropout_add(x, residual, p) if p else x + residual


def feed(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, x: Tensor) -> Tensor:
    """``linear2(dropout(act(linear1(x))))``: one op without dropout, else two ops and dropout."""
    act, first, last = act_name(layer.activation), layer.linear1, layer.linear2
    if act is None or not is_plain(first):
        return project(last, layer.dropout(layer.activation(first(x))))
    if rate(layer.dropout) == 0 and is_plain(last):
        return mlp(x, first.weight, last.weight, first.bias, last.bias, act=act)
    return project(last, layer.dropout(linear(x, first.weight, first.bias, act=act)))


def project(layer: nn.Module, x: Tensor) -> Tensor:
    """``layer(x)``; for a plain linear layer by our op, whose bias gradient takes one pass."""
    if isinstance(layer, nn.Linear) and is_plain(layer):
        return linear(x, layer.weight, layer.bias)
    out: Tensor = layer(x)
    return out


def is_plain(layer: nn.Module) -> bool:
    """Whether this is torch's own linear layer without hooks, so that the weights define it."""
    return type(layer) is nn.Linear and not has_hooks(layer)


def act_name(activation: object) -> Activation | None:
    """The name in torchkiln of an activation of torch, or None."""
    if activation in (F.relu, torch.relu) or isinstance(activation, nn.ReLU):
        return "relu"
    if activation is F.silu or isinstance(activation, nn.SiLU):
        return "silu"
    if isinstance(activation, nn.GELU):
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    return "gelu" if activation is F.gelu else None
