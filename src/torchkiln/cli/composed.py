"""Calls of functions that are composed of ops, for ``torchkiln explain``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import torchkiln
from torchkiln.bench.layers import PIXELS, convolution
from torchkiln.bench.plan import device_of

SHAPE = (32 * PIXELS**2, 64)
"""Pixels of all images, and channels."""
VARIANTS = ("", "1x1", "residual", "silu")


def conv_bn_act(where: str, options: argparse.Namespace) -> tuple[Callable[..., Any], Any, Any]:
    """A call in eval mode, as in the benchmark; the weight requires a gradient for backward."""
    variant = options.variant or ""
    if variant not in VARIANTS:
        raise ValueError(
            f"{where}: --variant: got {variant!r}, expected "
            f"{' or '.join(map(repr, filter(None, VARIANTS)))}"
        )
    device, dtype = device_of(where, options.device), getattr(torch, options.dtype)
    kernel = 1 if variant == "1x1" else 3
    sample = convolution(device, dtype, options.shape or SHAPE, kernel)
    x, weight = sample.args[:2]
    weight.requires_grad_(options.direction != "forward")
    settings = dict(sample.kwargs)
    if variant == "residual":
        settings["residual"] = torch.randn_like(x)
    if variant == "silu":
        settings["act"] = "silu"
    return torchkiln.conv_bn_act, sample.args, settings


COMPOSED = {"conv_bn_act": conv_bn_act}
