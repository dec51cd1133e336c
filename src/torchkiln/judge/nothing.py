"""A candidate that computes nothing. Its time is that of sending inputs and returning outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Nothing(nn.Module):
    """Returns the same outputs for every call."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            self.register_buffer(f"output{i}", torch.zeros(*shape, dtype=dtype))

    def forward(self, *_args: object, **_kwargs: object) -> list[Tensor]:
        """The same outputs for any arguments."""
        return list(self.buffers())
