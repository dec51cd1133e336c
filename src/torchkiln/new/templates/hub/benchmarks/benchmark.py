"""Times of the kernel and of torch."""

from pathlib import Path

import torch
from kernels import get_local_kernel
from torch.nn import functional as F
from torch.utils.benchmark import Timer

BACKEND = "cuda" if torch.version.cuda else "cpu"
kernel = get_local_kernel(Path(__file__).parents[1], backend=BACKEND)


def plain(x: torch.Tensor) -> torch.Tensor:
    """Compute the unit with torch's ops."""
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


for columns in (1024, 4096, 14336):
    x = torch.randn(4096, 2 * columns, device=BACKEND, dtype=torch.bfloat16)
    for name, function in (("OPNAME", kernel.OPNAME), ("torch", plain)):
        timer = Timer("function(x)", globals={"function": function, "x": x})
        print(f"4096 x {columns}: {name} {timer.blocked_autorange().median * 1e6:.1f} us")
