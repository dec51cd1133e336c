"""What the GPU's hardware counters say of one call, beside what its spec says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchkiln.profile.report import Figures, read

__all__ = ["Figures", "ranges", "read"]


@contextmanager
def ranges() -> Iterator[None]:
    """NVTX ranges for Nsight, named after the ops that the dispatcher calls: ``torchkiln::relu``.

    They are torch's own (:class:`torch.autograd.profiler.emit_nvtx`): outside of this block there
    is nothing that could cost time.
    """
    with torch.autograd.profiler.emit_nvtx():
        yield
