"""The GPU's hardware counters for one call, and NVTX ranges named after the ops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["ranges"]


@contextmanager
def ranges() -> Iterator[None]:
    """NVTX ranges for Nsight, named after the ops that the dispatcher calls: ``torchkiln::relu``.

    They are torch's own (:class:`torch.autograd.profiler.emit_nvtx`) and cost nothing outside of
    this block.
    """
    with torch.autograd.profiler.emit_nvtx():
        yield
