"""What a device can do at most, measured beside the calls that are judged by it."""

from __future__ import annotations

import torch
from torch import Tensor

from torchkiln.bench.clock import Call

COPY, READ = "copy", "read"

MOSTLY_READ = 0.05
"""Below this share of written bytes a copy says too little: reading alone may be faster."""


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


def ceilings(moved: int, result_bytes: int, device: torch.device) -> dict[str, Call]:
    """Calls that move as many bytes as the one to be judged, which writes ``result_bytes``.

    The copy goes to new memory, as the results of ops do: on a CPU that is much of their time.
    """

    def ones(count: int) -> Tensor:
        return torch.ones(max(count, 1), dtype=torch.float32, device=device)

    calls: dict[str, Call] = {COPY: ones(moved // 8).clone}
    if result_bytes < MOSTLY_READ * moved:
        calls[READ] = ones(moved // 4).sum
    return calls
