"""The ceiling of a call: a copy, a read or a product, timed in turns with the call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchkiln.bench.clock import Call

COPY, READ, PRODUCT = "copy", "read", "product"

MOSTLY_READ = 0.05
"""Share of written bytes below which a pure read is timed too: it may be faster than a copy."""

INTENSE = 8
"""Operations per byte from which arithmetic may take longer than memory traffic."""


@dataclass(frozen=True)
class Work:
    """The minimum numbers of bytes and operations of a call."""

    bytes: int
    operations: int
    dtype: torch.dtype


def written(result: object, known: list[Tensor]) -> int:
    """Bytes of the storages of ``result`` that are not storages of ``known`` tensors.

    Each storage counts once: one tensor may be the gradient of several inputs.
    """
    tensors = result if isinstance(result, tuple | list) else (result,)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, Tensor)
    }
    before = {tensor.untyped_storage().data_ptr() for tensor in known}
    return sum(size for address, size in storages.items() if address not in before)


def ceilings(work: Work, result_bytes: int, device: torch.device) -> dict[str, Call]:
    """Calls of torch that do the same work as a call that writes ``result_bytes``.

    The copy writes to new memory, like ops: on a CPU page faults are a large part of the time. For
    arithmetic, a product of square matrices has as many operations.
    """
    moved = work.bytes

    def ones(count: int) -> Tensor:
        return torch.ones(max(count, 1), dtype=torch.float32, device=device)

    calls: dict[str, Call] = {COPY: ones(moved // 8).clone}
    if result_bytes < MOSTLY_READ * moved:
        calls[READ] = ones(moved // 4).sum
    if work.operations >= INTENSE * moved:
        side = max(16, round((work.operations / 2) ** (1 / 3) / 16) * 16)
        matrix = torch.ones(side, side, dtype=work.dtype, device=device)
        calls[PRODUCT] = partial(torch.mm, matrix, matrix)
    return calls
