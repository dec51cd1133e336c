"""Logits, targets and gradients that the tests of cross_entropy share."""

from __future__ import annotations

import torch
from torch import Tensor


def some(device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits that require a gradient, and a class per row."""
    logits = torch.randn(9, 21, device=device, requires_grad=True)
    return logits, torch.randint(21, (9,), device=device)


def gradient(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs, torch.ones_like(loss))
