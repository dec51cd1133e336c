"""Calls that the tests of cross_entropy share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def name(value: object) -> str:
    return str(value).removeprefix("torch.")


every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=name)


def some(device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits that need a gradient, and classes."""
    logits = torch.randn(9, 21, device=device, requires_grad=True)
    return logits, torch.randint(21, (9,), device=device)


def gradient(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs, torch.ones_like(loss))
