"""Collectives of a training step on 64 to 4096 processes, counted in one process without a GPU.

    python docs/collectives.py            # the table
    python docs/collectives.py --write    # writes it into docs/distributed.md

A process group of torch that sends nothing stands for the others, and tensors have sizes but no
memory, so the sizes are those of Llama 3 8B. Bytes are those that a process sends in a ring: of n
processes, (n - 1) / n of the whole tensor for a gather or a scattered sum, twice that for a sum.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from examples.parallel import Sizes
from parallel_models import LLAMA, MODULES, WithLoss, prepared, shape_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PAGE = Path(__file__).parent / "distributed.md"
BEGIN, END = "<!-- collectives -->\n\n", "\n<!-- /collectives -->"
RANKS = (64, 512, 4096)
TENSOR = 8
"""Processes along the tensor dimension."""
ROWS = {
    "fsdp": ("FSDP2", RANKS),
    "tp": ("tensor, sequence and loss parallel", (TENSOR,)),
    "fsdp+tp": (f"FSDP2 x {TENSOR} of tensor parallel", RANKS),
}
"""Engines by name: the title, and the numbers of processes."""
KINDS = {
    "allgather": "gather",
    "all_gather": "gather",
    "reduce_scatter": "scattered sum",
    "allreduce": "sum",
    "all_reduce": "sum",
}


class Counted(TorchDispatchMode):
    """Counts the collectives of this process by kind, and the bytes that it sends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if DTensor in types:  # it calls collectives, which this mode sees
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1].strip("_")
        if func.namespace not in {"c10d", "_c10d_functional"} or name == "wait_tensor":
            return result
        (kind,) = {kind for part, kind in KINDS.items() if name.startswith(part)}
        leaves = tree_leaves((args, kwargs, result))
        whole = max(one.nbytes for one in leaves if isinstance(one, Tensor))
        count = group_of(args).size()
        if count > 1:
            self.calls[kind] += 1
            self.sent[kind] += whole * (count - 1) // count * (2 if kind == "sum" else 1)
        return result


def group_of(args: Any) -> dist.ProcessGroup:
    """The process group of a collective: an object, or its name as the last argument."""
    objects = [one for one in args if isinstance(one, torch.ScriptObject)]
    for one in objects:
        if "ProcessGroup" in str(one._type()):
            return dist.ProcessGroup.unbox(one)
    name = next(one for one in reversed(args) if isinstance(one, str))
    names: Any = torch._C._distributed_c10d
    group: dist.ProcessGroup = names._resolve_process_group(name)
    return group


@contextmanager
def pretended(size: int) -> Iterator[None]:
    """The first process of a group of that size, whose collectives send nothing."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def counted(
    engine: str, size: int, modules: str, *, tensor: int = TENSOR, sizes: Sizes = LLAMA
) -> Counted:
    """The collectives of a training step with one sequence for each process or tensor group."""
    with warnings.catch_warnings(), pretended(size):
        warnings.simplefilter("ignore")
        shape = shape_of(engine, size, tensor)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        with torch.device("meta"):
            model = WithLoss(sizes, modules).to(torch.bfloat16)
        step = prepared(model, mesh, engine)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            tokens = torch.zeros(1, sizes.length, dtype=torch.long)
            step(tokens, tokens)
            with Counted() as found:
                step(tokens, tokens)
    return found


def row(engine: str, size: int) -> str:
    """A line of the table."""
    words = [ROWS[engine][0], str(size)]
    for modules in MODULES:
        found = counted(engine, size, modules)
        calls = ", ".join(f"{n} {kind}" for kind, n in sorted(found.calls.items()))
        words += [calls, f"{found.sent.total() / 2**30:.2f} GiB"]
    return f"| {' | '.join(words)} |"


def table() -> str:
    """Collectives with torch's modules beside those with torchkiln's."""
    lines = [
        "| engine | processes | torch: collectives | sent | torchkiln: collectives | sent |",
        "|---|---|---|---|---|---|",
        *(row(engine, size) for engine, (_, sizes) in ROWS.items() for size in sizes),
    ]
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> None:
    """Prints the table, or writes it into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/distributed.md")
    given = parser.parse_args(words)
    text = table()
    print(text, end="")
    if given.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        page = f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}"
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
