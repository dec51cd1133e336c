"""What a device can do at most, measured beside the calls that are judged by it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchkiln.bench.clock import Call

COPY, READ, PRODUCT = "copy", "read", "product"

MOSTLY_READ = 0.05
"""Below this share of written bytes a copy says too little: reading alone may be faster."""


INTENSE = 8
"""Operations for each byte, from which on arithmetic may take longer than moving."""


@dataclass(frozen=True)
class Work:
    """What a call has to do at least."""

    bytes: int
    operations: int
    dtype: torch.dtype


def written(result: object, known: list[Tensor]) -> int:
    """Bytes of the tensors in ``result``, each memory once, that are not views of ``known`` ones.

    One tensor may be the gradient of several inputs.
    """
    tensors = result if isinstance(result, tuple | list) else (result,)
    memories = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, Tensor)
    }
    before = {tensor.untyped_storage().data_ptr() for tensor in known}
    return sum(size for address, size in memories.items() if address not in before)


def ceilings(work: Work, result_bytes: int, device: torch.device) -> dict[str, Call]:
    """Calls that do as much as the one to be judged, which writes ``result_bytes``.

    The copy goes to new memory, as the results of ops do: on a CPU that is much of their time.
    Where the work is arithmetic, a product of square matrices computes as much, in torch's words,
    which is the best that a device is known to do.
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
