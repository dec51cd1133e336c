"""The module of the rotary embedding."""

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor, nn

from torchkiln.ops.rope import rope
from torchkiln.typing import Device


class RotaryEmbedding(nn.Module):
    """:func:`torchkiln.rope` with angles ``position / base**(2 * pair / rotated)``.

    The tables ``cos`` and ``sin`` have a row for each position. They stay in float32 if the module
    is converted to half precision, and are not part of the ``state_dict``.

    Args:
        head_dim: elements of a head.
        max_positions: rows of the tables.
        base: the base of the angles.
        rotary_dim: as for :func:`torchkiln.rope`.
        device: of the tables.
        dtype: float64 for tables in float64; other dtypes give float32.

    The other arguments are those of :func:`torchkiln.rope`.

    Shape:
        q, k and both outputs ``[batch, heads, tokens, head_dim]``; positions ``[tokens]`` or
        ``[batch, tokens]``, by default 0, 1, 2, ...
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_positions: int = 4096,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        heads_dim: int = -3,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_positions = max_positions
        self.base = base
        self.interleaved = interleaved
        self.rotary_dim = rotary_dim
        self.heads_dim = heads_dim
        self._set_tables(torch.device(device or torch.get_default_device()), dtype)

    def _set_tables(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Computes the tables in float64 and rounds them once."""
        rotated = self.head_dim if self.rotary_dim is None else self.rotary_dim
        pairs = torch.arange(0, rotated, 2, device=device, dtype=torch.float64)
        places = torch.arange(self.max_positions, device=device, dtype=torch.float64)
        angles = torch.outer(places, self.base ** (-pairs / rotated))
        table = torch.float64 if dtype == torch.float64 else torch.float32
        self.register_buffer("cos", angles.cos().to(table), persistent=False)
        self.register_buffer("sin", angles.sin().to(table), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Moves the module; tables of another dtype are computed again."""
        before = self.cos.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos.dtype != before:
            self._set_tables(self.cos.device, self.cos.dtype)
        return self

    @overload
    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self, q: Tensor, k: None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, None]: ...
    def forward(
        self, q: Tensor, k: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Applies the op."""
        cos, sin = self.cos, self.sin
        if positions is None:
            tokens = q.shape[
                -5 - (self.heads_dim if self.heads_dim < 0 else self.heads_dim - q.dim())
            ]
            cos, sin = cos[:tokens], sin[:tokens]
        return rope(
            q,
            k,
            cos,
            sin,
            interleaved=self.interleaved,
            positions=positions,
            rotary_dim=self.rotary_dim,
            heads_dim=self.heads_dim,
        )

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return (
            f"{self.head_dim}, {self.max_positions}, base={self.base}, "
            f"interleaved={self.interleaved}, rotary_dim={self.rotary_dim}, "
            f"heads_dim={self.heads_dim}"
        )
