"""The processes of test_sync_batch_norm.py: python FILE DEVICE PROCESSES STORE CASES...

Each case compares a process's results for its part of a batch with those of the whole batch.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from torchkiln.nn.convolution import norm_act

Sync: Any = torchkiln.nn.SyncBatchNormAct
CHANNELS, IMAGE = 16, (3, 5)
F32 = torch.float32
ACTS: dict[str, Any] = {"relu": F.relu, "silu": F.silu, "none": lambda y: y}


def parts_of(kind: str) -> list[int]:
    """The number of images of each process."""
    size = dist.get_world_size()
    kinds = {"equal": [2] * size, "unequal": [4, *range(1, size)], "empty": [5] + [0] * (size - 1)}
    return kinds[kind]


def mine(whole: Tensor, parts: list[int]) -> Tensor:
    return whole.split(parts)[dist.get_rank()]


def total(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


def drawn(device: torch.device, parts: list[int], count: int, dtype: torch.dtype) -> list[Tensor]:
    """Random tensors that are the same in every process."""
    shape = (sum(parts), CHANNELS, *IMAGE)
    return [torch.randn(shape, dtype=torch.float64).to(device, dtype) for _ in range(count)]


def made(device: torch.device, **options: Any) -> nn.Module:
    layer: nn.Module = Sync(CHANNELS, device=device, **options)
    for parameter in layer.parameters():
        parameter.data = torch.randn(CHANNELS).to(parameter)
    return layer


def torchs(layer: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    """Torch's batch norm, sum and activation with a layer's parameters and statistics, updated."""
    layer.num_batches_tracked.add_(1)
    momentum = layer.momentum or 1 / float(layer.num_batches_tracked)
    y = F.batch_norm(
        x, layer.running_mean, layer.running_var, layer.weight, layer.bias, True, momentum
    )
    return ACTS[layer.act](y if residual is None else y + residual)


def torchs_results(device: torch.device) -> None:
    """Outputs, gradients and running statistics equal torch's for the whole batch, in float64."""
    dtype = torch.float64
    cases = itertools.product(("equal", "unequal", "empty"), ACTS, (False, True), (False, True))
    for kind, act, has_residual, is_last in cases:
        parts = parts_of(kind)
        layer = made(device, act=act, momentum=0.3 if is_last else None, dtype=dtype)
        whole = copy.deepcopy(layer)
        order = torch.channels_last if is_last else torch.contiguous_format
        for _ in range(2):
            *leaves, grad = drawn(device, parts, 2 + has_residual, dtype)
            wholes = [leaf.clone().requires_grad_() for leaf in leaves]
            owned = [mine(t, parts).clone(memory_format=order).requires_grad_() for t in leaves]
            y = layer(*owned)
            expected = torchs(whole, wholes[0], wholes[1] if has_residual else None)
            assert len(y) == 0 or y.is_contiguous(memory_format=order)
            torch.testing.assert_close(y, mine(expected, parts))
            found = torch.autograd.grad(y, [*owned, *layer.parameters()], mine(grad, parts))
            right = torch.autograd.grad(expected, [*wholes, *whole.parameters()], grad)
            for i, (one, other) in enumerate(zip(found, right, strict=True)):
                is_part = i < len(owned)
                torch.testing.assert_close(
                    one if is_part else total(one), mine(other, parts) if is_part else other
                )
        torch.testing.assert_close(dict(layer.state_dict()), dict(whole.state_dict()))
        x = drawn(device, parts, 1, dtype)[0]
        torch.testing.assert_close(layer.eval()(x), ACTS[act](whole_eval(whole, x)))


def whole_eval(layer: Any, x: Tensor) -> Tensor:
    running = (layer.running_mean, layer.running_var)
    return F.batch_norm(x, *running, layer.weight, layer.bias, False, 0.0, layer.eps)


def rounding(device: torch.device) -> None:
    """Errors are bn_act's for means of 1e5, and for bfloat16 with float32 parameters."""
    parts = parts_of("unequal")
    for dtype, shift in ((torch.float32, 1e5), (torch.bfloat16, 0.0)):
        layer: Any = made(device)
        x, grad = drawn(device, parts, 2, torch.float64)
        x, grad = (x + shift).to(dtype).requires_grad_(), grad.to(dtype)
        owned = mine(x.detach(), parts).requires_grad_()
        y = layer(owned)
        expected = torchkiln.bn_act(x, layer.weight, layer.bias, training=True)
        torch.testing.assert_close(y, mine(expected, parts))
        (found,) = torch.autograd.grad(y, owned, mine(grad, parts))
        (right,) = torch.autograd.grad(expected, x, grad)
        torch.testing.assert_close(found, mine(right, parts))
        assert y.dtype == found.dtype == dtype


def statistics_of_the_batch(device: torch.device) -> None:
    """Without running statistics, in a process group and in eval mode results agree with bn_act."""
    parts = parts_of("equal")
    group = dist.new_group(list(range(dist.get_world_size())))
    layer = Sync(
        CHANNELS, affine=False, track_running_stats=False, process_group=group, device=device
    )
    (x,) = drawn(device, parts, 1, torch.float32)
    expected = torchkiln.bn_act(x, training=True)
    torch.testing.assert_close(layer(mine(x, parts)), mine(expected, parts))
    owned = mine(x, parts)
    torch.testing.assert_close(layer.eval()(owned), torchkiln.bn_act(owned, training=True))
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        layer = Sync(CHANNELS, process_group=alone, device=device)
        twin = torchkiln.nn.BatchNormAct2d(CHANNELS, device=device)
        torch.testing.assert_close(layer(owned), twin(owned))
    dist.barrier()


def fused_models(device: torch.device) -> None:
    """Converting by torch or torchkiln, before or after fuse(), gives the whole batch's results."""
    torch.manual_seed(1)
    plain: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)
    ).to(device)
    sync = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    ours, twin, parallel = (copy.deepcopy(plain) for _ in range(3))
    assert len(torchkiln.fuse(sync).changed) == 2
    Sync.convert_sync_batchnorm(ours)
    assert len(torchkiln.fuse(ours).changed) == 2
    torchkiln.fuse(twin)
    Sync.convert_sync_batchnorm(twin)
    ddp = nn.parallel.DistributedDataParallel(Sync.convert_sync_batchnorm(parallel))
    parts = parts_of("equal")
    torch.manual_seed(2)
    x = torch.randn(sum(parts), 3, 6, 6).to(device)
    expected = plain(x)
    expected.square().mean().backward()
    for model in (sync, ours, twin, ddp):
        y = model(mine(x, parts))
        torch.testing.assert_close(y, mine(expected, parts))
        y.square().mean().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            grad = one.grad if model is ddp else total(one.grad) / len(parts)
            torch.testing.assert_close(grad, other.grad, atol=1e-5, rtol=1e-4)
    for model in (sync, ours, twin, parallel):
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
        torch.testing.assert_close(model.eval()(x), plain.eval()(x), atol=1e-5, rtol=1e-4)


def known_moments(device: torch.device) -> None:
    """A norm that gets its process's moments has the results of one that computes them."""
    parts = parts_of("unequal")
    layer: Any = made(device)
    grad = mine(drawn(device, parts, 1, F32)[0], parts)
    for dtype in (torch.float32, torch.bfloat16):
        x = mine(drawn(device, parts, 1, dtype)[0], parts).requires_grad_()
        moments = torch.ops.torchkiln._sync_bn_moments(x.detach())
        twin = copy.deepcopy(layer)
        y = norm_act(layer, x, None, "relu", moments)
        expected = twin(x)
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
        found, right = (torch.autograd.grad(z, x, grad.to(dtype)) for z in (y, expected))
        torch.testing.assert_close(found, right, rtol=0, atol=0)
        torch.testing.assert_close(layer.state_dict(), twin.state_dict(), rtol=0, atol=0)


def convolved_in_half(device: torch.device) -> None:
    """A fused bfloat16 model agrees with torch; on a GPU 1x1 convolutions may compute moments."""
    parts = parts_of("equal")
    conv = nn.Conv2d(64, 256, 1, bias=False)
    plain: nn.Module = nn.Sequential(conv, nn.BatchNorm2d(256), nn.ReLU()).to(device)
    sync = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert len(torchkiln.fuse(sync).changed) == 1
    x = torch.randn(sum(parts) * 8, 64, 56, 56, device=device).bfloat16()
    x = x.contiguous(memory_format=torch.channels_last)
    own = x.chunk(len(parts))[dist.get_rank()]
    with torch.autocast(device.type, torch.bfloat16):
        y, expected = sync(own), plain(x).chunk(len(parts))[dist.get_rank()]
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    for name in ("running_mean", "running_var"):
        found, right = (net.get_buffer(f"1.{name}") for net in (sync, plain))
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)


def statistics_of_the_process(device: torch.device) -> None:
    """Batch norms that are not synchronised use the statistics of their process, also if fused."""
    plain: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)
    ).to(device)
    fused, layer = copy.deepcopy(plain), torchkiln.nn.BatchNormAct2d(3, act="none", device=device)
    assert len(torchkiln.fuse(fused).changed) == 2
    (x,) = (mine(t[:, :3], parts_of("unequal")) for t in drawn(device, parts_of("unequal"), 1, F32))
    torch.testing.assert_close(fused(x), plain(x), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(dict(fused.named_buffers()), dict(plain.named_buffers()))
    if dist.get_rank() == 0:  # a single process calls without waiting
        torch.testing.assert_close(layer(x), F.batch_norm(x, None, None, training=True))
        fused(x)


def compiled(device: torch.device) -> None:
    """One graph without a break has the same results and running statistics."""
    parts = parts_of("unequal")
    layer = made(device, momentum=0.2)
    twin = copy.deepcopy(layer)
    call: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x, residual, grad = (mine(t, parts) for t in drawn(device, parts, 3, torch.float32))
        results = []
        for function in (call, twin):
            leaves = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
            y = function(*leaves)
            leaves += (layer if function is call else twin).parameters()
            results.append([y, *torch.autograd.grad(y, leaves, grad)])
        torch.testing.assert_close(*results)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(twin.named_buffers()))


def captured(device: torch.device) -> None:
    """A step is captured in a CUDA graph, so no call waits for the device."""
    parts = parts_of("unequal")
    layer = made(device, momentum=None)
    twin = copy.deepcopy(layer)
    x, grad = (mine(t, parts).clone() for t in drawn(device, parts, 2, torch.float32))
    x.requires_grad_()

    def step(module: Any) -> tuple[Tensor, ...]:
        y = module(x)
        return y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(layer)
            step(twin)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        step(layer)
        step(twin)
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(layer)
    for _ in range(2):
        (new,) = drawn(device, parts, 1, torch.float32)
        with torch.no_grad():
            x.copy_(mine(new, parts))
        graph.replay()
        torch.testing.assert_close(results, step(twin))
    torch.testing.assert_close(dict(layer.named_buffers()), dict(twin.named_buffers()))
    torch.cuda.synchronize()


def capture(net: nn.Module, images: Tensor) -> Any:
    """A training step of all processes as a CUDA graph; docs/distributed.md has these lines."""
    optimizer = torch.optim.AdamW(net.parameters(), capturable=True)

    def step(model: nn.Module) -> Tensor:
        loss: Tensor = model(images).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = nn.parallel.DistributedDataParallel(net)
        for _ in range(11):
            step(model)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model)
    return graph, loss, functools.partial(step, model)


def captured_training(device: torch.device) -> None:
    """Parameters and statistics after captured steps equal those of steps without a graph."""
    parts = parts_of("equal")
    x = torch.empty(parts[0], CHANNELS, *IMAGE, device=device)
    nets: list[Any] = [
        nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), made(device)).to(device)
    ]
    nets.append(copy.deepcopy(nets[0]))
    x.copy_(mine(drawn(device, parts, 1, F32)[0], parts))
    graph, loss, _ = capture(nets[0], x)
    *_, step = capture(nets[1], x)
    for _ in range(3):
        x.copy_(mine(drawn(device, parts, 1, F32)[0], parts))
        graph.replay()
        torch.testing.assert_close(loss, step())
    torch.testing.assert_close(*(dict(net.state_dict()) for net in nets))
    assert int(nets[0][1].num_batches_tracked) == 14
    torch.cuda.synchronize()


def process(rank: int, size: int, kind: str, store: str, cases: list[str]) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        rank=rank,
        world_size=size,
        init_method=f"file://{store}",
        timeout=timedelta(seconds=300),
    )
    for case in cases:
        torch.manual_seed(0)
        globals()[case](device)
    dist.destroy_process_group()


def main(kind: str, count: str, store: str, *cases: str) -> None:
    children = []
    for rank in range(int(count)):
        child = os.fork()  # the children share the imports
        if child == 0:
            try:
                process(rank, int(count), kind, store, list(cases))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    failed = [os.waitpid(child, 0)[1] for child in children]
    if any(failed):
        raise SystemExit(1)
    print("equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
