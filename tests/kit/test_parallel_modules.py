"""Parallel styles of modules, and random numbers of dropout, in several processes."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run

import pytest
import torch
import torch.distributed as dist
from processes import leaving, run_processes

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)

STYLES = """
import copy
import torchkiln
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torchkiln.distributed import ColwiseParallel, RowwiseParallel, SequenceParallel


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm = getattr(torchkiln.nn, kind)(16)
        self.up = torchkiln.nn.Linear(16, 32, act="gelu")
        self.down = torchkiln.nn.Linear(32, 16)
        self.last = getattr(torchkiln.nn, kind)(16)

    def forward(self, x, residual):
        y, total = self.norm(x, residual)
        return self.last(self.down(self.up(y)), total)


mesh = init_device_mesh(device, (size,))
for kind, local in (("AddRMSNorm", True), ("AddLayerNorm", False)):
    torch.manual_seed(0)
    alone = Block(kind).double()
    block = copy.deepcopy(alone)
    x, residual = (torch.randn(4, 8, 16, dtype=torch.float64).requires_grad_() for _ in range(2))
    expected = alone(x, residual)
    (expected[0].square() + 3 * expected[1]).sum().backward()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(use_local_output=local),
    }
    parallelize_module(block, mesh, plan)
    mine = [t.detach().chunk(size, 1)[rank].clone().requires_grad_() for t in (x, residual)]
    found = block(*mine)
    assert isinstance(found[0], DTensor) != local
    for one, other in zip(found, expected):
        own = one if local else one.to_local()
        torch.testing.assert_close(own, other.chunk(size, 1)[rank])
    (found[0].square() + 3 * found[1]).sum().backward()
    for one, other in zip(mine, (x, residual)):
        torch.testing.assert_close(one.grad, other.grad.chunk(size, 1)[rank])
    for one, other in zip(block.parameters(), alone.parameters()):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)

# Residuals of linear layers.
torch.manual_seed(0)
alone = nn.ModuleList([torchkiln.nn.Linear(8, 16, act="gelu"), torchkiln.nn.Linear(16, 8)]).double()
both = copy.deepcopy(alone)
x, wide = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 16, dtype=torch.float64)
expected = alone[1](alone[0](x, wide), x)
parallelize_module(both, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
found = both[1](both[0](x, wide.chunk(size, 1)[rank]), x)
torch.testing.assert_close(found, expected)
try:
    parallelize_module(torchkiln.nn.Linear(8, 8, act="relu"), mesh, RowwiseParallel())
except ValueError as error:
    assert "got a layer with act='relu', expected 'none'" in str(error)
else:
    raise AssertionError
"""

DROPOUT = """
import torchkiln
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

line = init_device_mesh(device, (size,))
grid = init_device_mesh(device, (2, size // 2))
bias = torch.zeros(64, requires_grad=True)
ones, zeros = torch.ones(8, 16, 64), torch.zeros(8, 16, 64)


def dropped(mesh, placements, *, training=True, with_bias=False, grad=True):
    torch.manual_seed(5)
    spread = [distribute_tensor(t.clone(), mesh, placements) for t in (ones, zeros)]
    x, residual = (t.requires_grad_(grad) for t in spread)
    if not with_bias:
        return x, torchkiln.dropout_add(x, residual, 0.25, training)
    shift = distribute_tensor(torch.zeros(64), mesh, [Replicate()] * mesh.ndim).requires_grad_(grad)
    return (x, shift), torchkiln.bias_dropout_add(x, shift, residual, 0.25, training)


for mesh, placements in (
    (line, [Shard(0)]),
    (line, [Shard(2)]),
    (line, [Replicate()]),
    (grid, [Shard(0), Shard(1)]),
    (grid, [Shard(1), Shard(1)]),
    (grid, [Shard(0), Replicate()]),
):
    x, y = dropped(mesh, placements)
    for dim, placement in enumerate(placements):
        assert mesh.size(dim) == 1 or y.placements[dim] == placement
    whole = y.full_tensor()
    kept = whole != 0
    assert abs(kept.double().mean() - 0.75) < 0.03, kept.double().mean()
    torch.testing.assert_close(whole[kept], torch.full_like(whole[kept], 4 / 3))

    # All processes agree, so copies are equal; shards differ.
    everywhere = [torch.empty_like(whole) for _ in range(size)]
    dist.all_gather(everywhere, whole.detach().contiguous())
    assert all(torch.equal(one, whole) for one in everywhere)
    own = y.to_local().detach()
    for dim, placement in enumerate(placements):
        if placement.is_shard() and mesh.size(dim) > 1:
            one, other = whole.chunk(mesh.size(dim), placement.dim)[:2]
            assert not torch.equal(one, other)

    # Backward has the mask of forward; a second call with the same seed the same one.
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor() != 0, kept)
    assert torch.equal(dropped(mesh, placements)[1].full_tensor(), whole)
    assert torch.equal(dropped(mesh, placements, grad=False)[1].full_tensor(), whole)
    with torch.no_grad():
        assert torch.equal(dropped(mesh, placements)[1].full_tensor(), whole)
    assert torch.equal(dropped(mesh, placements, training=False)[1].full_tensor(), ones)

    (x, shift), y = dropped(mesh, placements, with_bias=True)
    assert torch.equal(y.full_tensor(), whole)
    y.sum().backward()
    torch.testing.assert_close(shift.grad.full_tensor(), whole.sum((0, 1)))
    if rank == 0:  # the first shard has the numbers of a plain call
        torch.manual_seed(5)
        like = torch.ones_like(own)
        assert torch.equal(torchkiln.dropout_add(like, torch.zeros_like(own), 0.25), own)
    dist.barrier()

# A gradient with other placements gets those of the mask.
x, y = dropped(line, [Shard(0)])
y.redistribute(placements=[Shard(1)]).square().sum().backward()
assert torch.equal(x.grad.full_tensor() != 0, y.full_tensor() != 0)
module = torchkiln.nn.DropoutAdd(0.5)
from torchkiln.distributed import SequenceParallel
from torch.distributed.tensor.parallel import parallelize_module
parallelize_module(module, line, SequenceParallel())
assert module(ones[:, : 16 // size], zeros[:, : 16 // size]).shape == ones.shape
"""


def test_programs_end_after_their_checks(tmp_path: Path) -> None:
    """Processes end without atexit handlers and the shutdown in which a thread of gloo may fail."""
    program = tmp_path / "program.py"
    program.write_text("import atexit, os\natexit.register(os._exit, 7)\n")
    assert run([sys.executable, str(leaving(program, tmp_path))], check=False).returncode == 0


def test_styles_of_modules_with_several_inputs(device: torch.device, tmp_path: Path) -> None:
    run_processes(STYLES, device, 2, tmp_path)


def test_shards_draw_their_own_numbers(device: torch.device, tmp_path: Path) -> None:
    run_processes(DROPOUT, device, 4, tmp_path)
