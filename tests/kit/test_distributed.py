"""Ops and modules on several devices, with torch's DTensor and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes

SCRIPT = """
import torchkiln
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torchkiln.nn.RMSNorm(16)
        self.up = torchkiln.nn.Linear(16, 32, act="gelu")
        self.down = torchkiln.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)))


torch.manual_seed(0)
alone = Block().double()
x = torch.randn(4, 6, 16, dtype=torch.float64, requires_grad=True)
alone(x).square().sum().backward()

mesh = init_device_mesh(device, (size,))


def check(kind):
    torch.manual_seed(0)
    block = Block().double()
    if kind == "tensor parallel":
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
        mine = distribute_tensor(x.detach(), mesh, [Shard(1)]).to_local().requires_grad_()
        block(mine).square().sum().backward()
        grad = distribute_tensor(x.grad, mesh, [Shard(1)]).to_local()
        torch.testing.assert_close(mine.grad, grad)
    else:
        fully_shard(block, mesh=mesh)
        mine = x.detach().chunk(size)[rank]
        block(mine).square().sum().backward()
    for one, other in zip(block.parameters(), alone.parameters(), strict=True):
        found = one.grad.full_tensor()
        found = found * size if kind == "FSDP2" else found  # which averages over the devices
        torch.testing.assert_close(found, other.grad)


for kind in ("tensor parallel", "FSDP2"):
    check(kind)
"""


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_gradients_of_two_processes_are_those_of_one(device: torch.device, tmp_path: Path) -> None:
    """Two processes, with tensor parallelism or FSDP2, have the gradients of one."""
    run_processes(SCRIPT, device, 2, tmp_path)


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_a_call_does_not_get_the_placements_of_another() -> None:
    """Torch caches placements without strings and floats; relu must not get those of a sum."""
    from torch.distributed._local_tensor import LocalTensorMode  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415

    import torchkiln  # noqa: PLC0415
    from torchkiln.testing.contract.sharding import process_group  # noqa: PLC0415

    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    with process_group(2), LocalTensorMode(2), torch.no_grad():
        mesh = init_device_mesh("cpu", (2,))
        a, b = (distribute_tensor(t, mesh, [Shard(1)], src_data_rank=None) for t in (x, weight))
        first: Any = torchkiln.linear(a, b, act="none", scale=0.5)
        assert first.placements[0].is_partial()
        second: Any = torchkiln.linear(a, b, act="relu", scale=1.0)
        found = second.full_tensor().reconcile()
    torch.testing.assert_close(found, torch.relu(x @ weight.T))
