"""Calls of functions that are composed of ops, for ``torchkiln explain``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchkiln
from torchkiln.bench.plan import device_of

PIXELS = 28
"""Height and width of the images."""
SHAPE = (32 * PIXELS**2, 64)
"""Pixels of all images, and channels."""
VARIANTS = ("", "1x1", "residual", "silu")


def conv_bn_act(where: str, options: argparse.Namespace) -> tuple[Callable[..., Any], Any, Any]:
    """A call in eval mode: images with adjacent channels, a kernel of 3 x 3, float32 statistics."""
    variant = options.variant or ""
    if variant not in VARIANTS:
        raise ValueError(
            f"{where}: --variant: got {variant!r}, expected "
            f"{' or '.join(map(repr, filter(None, VARIANTS)))}"
        )
    device, dtype = device_of(where, options.device), getattr(torch, options.dtype)
    pixels, channels = options.shape or SHAPE
    size = (max(pixels // PIXELS**2, 1), PIXELS, PIXELS, channels)
    x, residual = (torch.randn(size, device=device, dtype=dtype).movedim(-1, 1) for _ in range(2))
    kernel = 1 if variant == "1x1" else 3
    weight = torch.randn(channels, channels, kernel, kernel, device=device, dtype=dtype)
    owned = torch.promote_types(dtype, torch.float32)
    vectors = torch.rand(4, channels, device=device, dtype=owned) + 0.5
    settings: dict[str, Any] = {"padding": kernel // 2}
    if variant == "residual":
        settings["residual"] = residual
    if variant == "silu":
        settings["act"] = "silu"
    parameter = nn.Parameter(weight, requires_grad=not options.forward)
    return torchkiln.conv_bn_act, (x, parameter, None, *vectors), settings


COMPOSED = {"conv_bn_act": conv_bn_act}
