"""Overrides of torchtitan's RMS norm, rotary embeddings, feed-forward and loss.

Name those to use::

    --override.imports torchkiln.hub.torchtitan.rms_norm,torchkiln.hub.torchtitan.loss

Parameters, checkpoints and sharding do not change. DTensors, and calls while ``spmd_types`` checks
types, run torchtitan's forward. Classes that torchtitan derives from these are not replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss, cross_entropy_loss
from torchtitan.config import derive, override
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.models.common import feed_forward as titan_feed_forward
from torchtitan.models.common import nn_modules
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE

import torchkiln


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether no tensor is distributed, and no types of shards are checked."""
    return not spmd_types.is_type_checking() and not any(isinstance(x, DTensor) for x in tensors)


class RMSNorm(nn_modules.RMSNorm):
    """torchtitan's norm, computed by :func:`torchkiln.rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.RMSNorm.Config):
        """The options of torchtitan's norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension."""
        if not is_plain(x, self.weight) or getattr(self.weight, "dtype", x.dtype) != x.dtype:
            return super().forward(x)
        return torchkiln.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class FeedForward(titan_feed_forward.FeedForward):
    """The gated unit with :func:`torchkiln.swiglu` between its projections."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_feed_forward.FeedForward.Config):
        """The options of torchtitan's feed-forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes three products and the gate."""
        gate, up = self.w1(x), self.w3(x)
        return self.w2(torchkiln.swiglu(gate, up) if is_plain(gate, up) else F.silu(gate) * up)


class Rotation(RoPE):
    """Rotary embeddings as one :func:`torchkiln.rope`; under ``torch.compile``, torchtitan's."""

    # the cache of torchtitan, and its cosines and sines
    tables: tuple[Tensor, Tensor, Tensor] | None = None

    def factors(self) -> tuple[Tensor, Tensor]:
        """A cosine and a sine for each pair, contiguous."""
        if self.tables is None or self.tables[0] is not self.cache:
            cache, is_complex = self.cache, self.cache.is_complex()
            cos, _, sin, _ = (cache.real, 0, cache.imag, 0) if is_complex else cache.chunk(4, -1)
            self.tables = cache, cos.contiguous(), sin.contiguous()
        return self.tables[1:]

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> Any:
        """Rotates ``[batch, tokens, heads, head_dim]``; NaN for a position outside of the cache."""
        is_float32 = self.cache.dtype in {torch.float32, torch.complex64}
        is_ours = is_float32 and query.dtype == key.dtype != torch.float64
        if torch.compiler.is_compiling() or not (is_ours and is_plain(query, key, self.cache)):
            return super().forward(query, key, positions)
        cos, sin = self.factors()
        if positions is None:
            cos, sin = cos[: query.shape[1]], sin[: query.shape[1]]
        options = {"interleaved": self.cache.is_complex(), "positions": positions, "heads_dim": -2}
        return torchkiln.rope(query, key, cos, sin, **options)


class CosSin(Rotation, CosSinRoPE):
    """The rotation of halves of a head."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """The options of torchtitan's embeddings."""


class Complex(Rotation, ComplexRoPE):
    """The rotation of neighbouring elements."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """The options of torchtitan's embeddings."""


def cross_entropy(pred: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """The sum of the losses in float32, without a float32 copy of the logits."""
    if not is_plain(pred, labels) or spmd_mesh_size("tp") > 1:
        return cross_entropy_loss(pred, labels, **options)
    logits, target = pred.flatten(0, 1), labels.flatten(0, 1)
    return torchkiln.cross_entropy(
        logits, target, ignore_index=IGNORE_INDEX, reduction="sum", loss_dtype=torch.float32
    )


class Loss(CrossEntropyLoss):
    """torchtitan's loss, computed by :func:`torchkiln.cross_entropy`."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """The options of torchtitan's loss."""

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        super().__init__(config)
        self.fn = cross_entropy
        self._maybe_compile(compile_config)


@override(target=nn_modules.RMSNorm.Config, exact=True, description="torchkiln.rms_norm")
def rms_norm(config: Any) -> Any:
    """The configuration with torchkiln's norm."""
    return derive(config, RMSNorm.Config)


@override(target=titan_feed_forward.FeedForward.Config, exact=True, description="torchkiln.swiglu")
def feed_forward(config: Any) -> Any:
    """The configuration with torchkiln's feed-forward."""
    return derive(config, FeedForward.Config)


@override(target=RoPE.Config, description="torchkiln.rope")
def rope(config: Any) -> Any:
    """The configuration with torchkiln's embeddings; other formats are returned unchanged."""
    found = {CosSinRoPE.Config: CosSin.Config, ComplexRoPE.Config: Complex.Config}.get(type(config))
    return config if found is None else derive(config, found)


@override(target=CrossEntropyLoss.Config, exact=True, description="torchkiln.cross_entropy")
def loss(config: Any) -> Any:
    """The configuration with torchkiln's loss."""
    return derive(config, Loss.Config)
