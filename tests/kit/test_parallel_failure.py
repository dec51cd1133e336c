"""A process that dies while it trains with others."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import outcomes, processes_on, run_processes

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
TIMEOUTS = {"cpu": 300.0, "cuda": 30.0}
"""Seconds after which NCCL gives up; gloo sees at once that a connection is closed."""
# The system resets a connection that has unread data, which depends on the load.
ERRORS = {"cpu": r"Connection (closed|reset) by peer|Broken pipe", "cuda": "DistBackendError"}

TRAIN = f"""
import os, signal
sys.path.insert(0, {str(EXAMPLES)!r})
import parallel
from torch.distributed.device_mesh import init_device_mesh

torch.manual_seed(0)
mesh = init_device_mesh(device, (size, 1), mesh_dim_names=("data", "tensor"))
sizes, place = parallel.Sizes(), torch.device(device, rank if device == "cuda" else None)
model = parallel.Model(sizes)
parallel.shard_tensors(model, mesh["tensor"])
parallel.shard_data(model, mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def step(number):
    tokens, target = parallel.batch(number, sizes, mesh["data"], place)
    group = mesh["tensor"].get_group()
    parallel.vocab_parallel_cross_entropy(model(tokens), target, group).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

DIE = """
step(0)
parallel.save(FOLDER, 1, model, optimizer)
if rank == size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
step(1)
"""

CONTINUE = """
assert parallel.load(FOLDER, model, optimizer) == 1
assert optimizer.state_dict()["state"]
step(1)
"""


def test_the_others_end_with_an_error_and_the_checkpoint_loads(
    device: torch.device, tmp_path: Path
) -> None:
    folder = f"FOLDER = {str(tmp_path / 'checkpoint')!r}\n"
    size = processes_on(device, 2)
    timeout = TIMEOUTS[device.type]
    *others, last = outcomes(folder + TRAIN + DIE, device, size, tmp_path, timeout=timeout)
    assert last.returncode == -signal.SIGKILL, last.stderr[-3000:]
    for other in others:
        assert other.returncode != 0
        assert re.search(ERRORS[device.type], other.stderr), other.stderr[-3000:]
    (tmp_path / "alone").mkdir()
    run_processes(folder + TRAIN + CONTINUE, torch.device("cpu"), 1, tmp_path / "alone")
