"""The kernels that torch chooses for attention, as notes of an explanation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend


@contextmanager
def attention_notes(notes: list[str]) -> Iterator[None]:
    """Adds a note for each call of ``F.scaled_dot_product_attention``.

    The function is replaced in its module, because a torch mode would change the route of our ops.
    """
    original = F.scaled_dot_product_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        chosen = SDPBackend(torch._fused_sdp_choice(*given, **options))
        mask = "no mask" if attn_mask is None else f"a mask of shape {list(attn_mask.shape)}"
        notes.append(
            f"scaled_dot_product_attention of {list(query.shape)} and {list(key.shape)} with "
            f"{'the causal mask' if is_causal else mask}: torch chose {chosen.name}"
        )
        return original(*given, **options)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
