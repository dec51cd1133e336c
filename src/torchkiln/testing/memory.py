"""Bytes that are allocated on a GPU."""

from __future__ import annotations

import time
from itertools import pairwise, repeat

import torch

WAIT = 0.02
"""Seconds between two readings."""


def allocated_bytes(device: torch.device) -> int:
    """Bytes of this process's tensors on a GPU, once two readings are equal.

    backward() returns before autograd's thread of the device has released its last tensors.
    """

    def reading(_: None) -> int:
        time.sleep(WAIT)
        return torch.cuda.memory_allocated(device)

    torch.cuda.synchronize(device)
    return next(now for before, now in pairwise(map(reading, repeat(None))) if now == before)
