"""One op in pure torch, registered with torch.library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SCHEMA = "softclip(Tensor x, float limit=1.0) -> Tensor"
LIBRARY = torch.library.Library("foreign_ops", "DEF")
LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))


def kernel(x: Tensor, limit: float = 1.0) -> Tensor:
    """limit * tanh(x / limit), of ATen's ops: autograd, vmap, Meta and compile come with them."""
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise TypeError(f"foreign_ops.softclip: x: got dtype {kind}, expected a floating point one")
    if limit <= 0:
        raise ValueError(f"foreign_ops.softclip: limit: got {limit}, expected more than 0")
    return limit * torch.tanh(x / limit)


LIBRARY.impl("softclip", kernel, "CompositeImplicitAutograd")


def softclip(x: Tensor, limit: float = 1.0) -> Tensor:
    """The op."""
    result: Any = torch.ops.foreign_ops.softclip(x, limit)
    return result
