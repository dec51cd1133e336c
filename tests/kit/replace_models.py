"""Models that the tests of replace share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS = 99
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
"""Settings of small models of transformers."""


class Rms(nn.Module):
    """The RMS norm of Llama's family, with other names of attributes."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(size))
        self.tiny = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.gamma * wide.to(x.dtype)


class OffsetRms(nn.Module):
    """The norm of Gemma's family: the weight is stored without its 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight.float())).to(x.dtype)


class PlainLayer(nn.Module):
    """A layer norm whose weight and bias have other names."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(size))
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.scale
            + self.shift
        )


class SlowGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3))))


class Gated(nn.Module):
    """A gated feed-forward layer; ``form`` selects how its forward is written."""

    def __init__(self, form: str = "separate", p: float = 0.0) -> None:
        super().__init__()
        self.form = form
        self.wide = nn.Linear(16, 48 if "packed" in form else 24)
        self.gate = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.dropout = nn.Dropout(p)
        if "packed" in form:
            del self.gate

    def forward(self, x: Tensor) -> Tensor:
        if "packed" in self.form:
            halves = self.wide(x).chunk(2, -1)
            up, gate = halves if self.form == "packed swapped" else halves[::-1]
        else:
            gate, up = self.gate(x), self.wide(x)
        h = F.silu(gate) * up
        if self.form == "hidden dropout":
            return self.down(F.dropout(h, 0.5, self.training))
        return self.down(self.dropout(h))


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [Rms(16), nn.LayerNorm(16), OffsetRms(16), Gated(), PlainLayer(16), SlowGelu()]
    return nn.Sequential(*parts, nn.Linear(16, 4)).to(dtype)
