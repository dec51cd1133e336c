"""FP8 products on several devices: sharding rules, tensor parallelism, and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import Tensor
from torch.nn import functional as F

import torchkiln
from torchkiln.testing.contract import sharding

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)

ROWS, FEATURES, COLUMNS = 1024, 512, 1024


def calls() -> Iterator[tuple[int, Any, tuple[Any, ...]]]:
    """Calls, each after the number of placements that its op offers on a mesh of two devices."""
    ops = torch.ops.torchkiln
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, ROWS // 2, COLUMNS, generator=generator)
    matrix = torch.randn(ROWS, COLUMNS, generator=generator)
    weight = torch.randn(FEATURES, COLUMNS, generator=generator) / COLUMNS**0.5
    bias = torch.randn(FEATURES, generator=generator)
    data, scale, turned, turned_scale = ops.quantize_both(x)
    square = ops.quantize_weight(weight)
    yield 4, ops.quantize, (x,)
    yield 3, ops.quantize_both, (x,)
    yield 3, ops.quantize_both, (x, True)
    yield 3, ops.quantize_weight, (weight,)
    yield 3, ops.transpose_quantized, (data, scale)
    yield 3, ops.transpose_quantized, (data, scale, True)
    yield 4, ops.dequantize, (data, scale)
    yield 3, ops.dequantize, square[:2]
    yield 5, ops._quantized_product, (data, scale, *square[:2], True, bias, torch.float32)
    parts = ops.quantize_both(matrix)
    yield 4, ops._quantized_product, (turned, turned_scale, *parts[2:], False, None, torch.float32)
    parts = ops.quantize_both(matrix, True)
    yield 4, ops._quantized_product, (turned, turned_scale, *parts[2:], True, None, torch.float32)
    yield 5, ops.linear_fp8, (x, weight, bias)
    yield 5, ops.linear_fp8, (data, weight, bias, scale, None, *square)
    yield 3, ops.gated_linear_fp8, (x, weight)
    yield 3, ops.gated_linear_fp8, (data, weight, "gelu", scale, None, *square)
    yield 2, ops._gated_fp8_backward, (x[..., :FEATURES].contiguous(), x, "silu")
    # Both halves of 128 columns have one scale, so the columns cannot be split.
    narrow = torch.randn(4, 128, generator=generator)
    yield 2, ops.quantize, (narrow,)
    yield 1, ops.quantize_both, (narrow,)
    yield 2, ops.linear_fp8, (narrow, torch.randn(128, 128, generator=generator))
    yield 1, ops._gated_fp8_backward, (narrow[:, :64].contiguous(), narrow, "silu")


@pytest.mark.parametrize("shape", sharding.MESHES, ids=str)
def test_rules(shape: tuple[int, ...]) -> None:
    from torch.distributed._local_tensor import LocalTensorMode  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    from torchkiln.distributed import rules  # noqa: PLC0415

    size = torch.Size(shape).numel()
    whole = [
        (count, sharding.Call(op.default, args, {}, of(op(*args)))) for count, op, args in calls()
    ]
    seen: list[int] = []
    strategies_of = rules.strategies_of

    def counted(*given: Any) -> Any:
        found = strategies_of(*given)
        seen.append(len(found))
        return found

    with (
        pytest.MonkeyPatch.context() as patch,
        sharding.process_group(size),
        LocalTensorMode(size),
    ):
        patch.setattr(rules, "strategies_of", counted)
        mesh = init_device_mesh("cpu", shape)
        for count, call in whole:
            seen.clear()
            sharding.require_choices("fp8", call, mesh)
            if len(shape) == 1:
                assert seen[0] == count, call.op


def of(result: Any) -> tuple[Tensor | None, ...]:
    """The results of a call. An expanded tensor has undefined values and becomes None."""
    found = result if isinstance(result, tuple) else (result,)
    return tuple(x if x.is_contiguous() or any(x.stride()) else None for x in found)


SCRIPT = """
import copy
import torchkiln
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)
from torchkiln.patch import fp8

fp8.LEAST = 27
if device == "cpu":
    fp8.missing = lambda *_: ""


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Linear(256, 512), nn.GELU()
        self.down, self.norm = nn.Linear(512, 256, bias=False), nn.LayerNorm(256)

    def forward(self, x):
        return self.norm(x + self.down(self.act(self.up(x))))


def replaced(model):
    report = torchkiln.replace(model, precision="fp8")
    assert [row.name for row in report.changed if row.now == "linear_fp8"] == ["up", "down"]
    return model


torch.manual_seed(0)
plain = Feed().bfloat16()
x = torch.randn(256, 256, dtype=torch.bfloat16)
alone = replaced(copy.deepcopy(plain))
expected = alone(x)
slope = torch.randn(256, 256)
(expected * slope).sum().backward()
mesh = init_device_mesh(device, (size,))


def require(model, factor, limit):
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        found, wanted = one.grad.full_tensor().float() * factor, other.grad.float()
        assert (found - wanted).norm() <= limit * wanted.norm()


for first in ("replace", "fully_shard"):
    model = copy.deepcopy(plain)
    if first == "replace":
        replaced(model)
    fully_shard(model, mesh=mesh)
    if first == "fully_shard":
        replaced(model)
    y = model(x.chunk(size)[rank])
    (y * slope.chunk(size)[rank]).sum().backward()
    assert torch.equal(y, expected.chunk(size)[rank])
    require(model, size, 0.01)

for first in ("replace", "parallelize"):
    model = copy.deepcopy(plain)
    if first == "replace":
        replaced(model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    if first == "parallelize":
        replaced(model)
    with CommDebugMode() as comm:
        y = model(x)
        (y * slope).sum().backward()
    assert sum(comm.get_comm_counts().values()) == 1, "only the sum after the second layer"
    assert (y - expected).float().norm() < 0.01 * expected.float().norm()
    for name in ("up.weight", "up.bias", "down.weight"):
        one, other = model.get_parameter(name).grad.full_tensor(), alone.get_parameter(name).grad
        off = (one - other).float().norm() / other.float().norm()
        assert off < 0.02, (name, off)

from torch.distributed.tensor import Replicate, Shard, distribute_tensor

weights = [torch.randn(n, k, dtype=torch.bfloat16) / 16 for n, k in ((512, 256), (256, 256))]
plain = [w.to(device).requires_grad_() for w in weights]
expected = torchkiln.gated_mlp(x.to(device), *plain, precision="fp8")
(expected * slope.to(device)).sum().backward()
sharded = [distribute_tensor(w, mesh, [Replicate()]).requires_grad_() for w in weights]
rows, slopes = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, slope))
with CommDebugMode() as comm:
    y = torchkiln.gated_mlp(rows, *sharded, precision="fp8")
    (y * slopes).sum().backward()
assert comm.get_total_counts() == 0, comm.get_comm_counts()
assert torch.equal(y.full_tensor(), expected)
for one, other in zip(sharded, plain, strict=True):
    off = (one.grad.full_tensor() - other.grad).float().norm() / other.grad.float().norm()
    assert off < 0.05, off
"""


def test_two_processes(device: torch.device, tmp_path: Path) -> None:
    """FSDP2 and tensor parallelism agree with one process, before and after the replacement."""
    run_processes(SCRIPT, device, 2, tmp_path)


def test_shards_of_the_sum_are_exact_parts() -> None:
    """Products of halves of k add up exactly to the whole product, as scales belong to blocks."""
    x, weight = torch.randn(64, 256), torch.randn(128, 256)
    parts = [
        torchkiln.linear_fp8(a, b)
        for a, b in zip(x.split(128, 1), weight.split(128, 1), strict=True)
    ]
    found = torchkiln.linear_fp8(x, weight)
    torch.testing.assert_close(sum(parts), found, rtol=1e-5, atol=1e-4)
    assert (found - F.linear(x, weight)).norm() > 1e-3 * found.norm()
