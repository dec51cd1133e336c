"""A script that trains the model of docs/examples/parallel.py, for the processes of a test."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"

TRAIN = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import parallel
from torch.distributed.device_mesh import init_device_mesh

torch.manual_seed(SEED)
mesh = init_device_mesh(device, (size // TENSOR, TENSOR), mesh_dim_names=("data", "tensor"))
sizes = parallel.Sizes(kv_heads=4)
place = torch.device(device, rank if device == "cuda" else None)
model = parallel.Model(sizes).double()
parallel.shard_tensors(model, mesh["tensor"])
parallel.shard_data(model, mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def step(number):
    drawn = parallel.batch(number, sizes, mesh["data"], torch.device("cpu"))  # equal everywhere
    tokens, target = (part.to(place) for part in drawn)
    group = mesh["tensor"].get_group()
    loss = parallel.vocab_parallel_cross_entropy(model(tokens), target, group)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / mesh["data"].size()
    dist.all_reduce(mean, group=mesh["data"].get_group())
    return mean.item()
"""


def training(folder: Path, *, tensor: int = 1, seed: int = 0) -> str:
    """A script with a model and step(), for ``tensor`` processes along the tensor dimension.

    The script reads or writes checkpoints in ``folder``; ``seed`` draws the first weights.
    """
    return f"FOLDER, TENSOR, SEED = {str(folder)!r}, {tensor}, {seed}\n{TRAIN}"
