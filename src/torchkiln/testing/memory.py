"""Bytes that are allocated on a GPU."""

from __future__ import annotations

import time

import torch

WAIT = 0.02
"""Seconds between two readings."""


def allocated_bytes(device: torch.device) -> int:
    """Bytes of this process's tensors on a GPU, once two readings are equal.

    backward() returns before autograd's thread of the device has released its last tensors.
    """
    torch.cuda.synchronize(device)
    before = -1
    while (now := torch.cuda.memory_allocated(device)) != before:
        before = now
        time.sleep(WAIT)
    return now
