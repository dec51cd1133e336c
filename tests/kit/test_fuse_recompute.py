"""torchkiln.fuse(recompute=True): backward computes intermediate results again."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from fused_nets import Bottleneck, Net, Plain, example, fused, outcome
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import torchkiln
from torchkiln.patch.graph import recompute
from torchkiln.patch.graph.recompute import Input

DTYPES = [torch.float64, torch.float32]


@pytest.fixture(autouse=True)
def reproducible() -> Iterator[None]:
    """Deterministic convolutions without TF32, so that gradients repeat bit by bit."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_of_a_net(device: torch.device, dtype: torch.dtype) -> None:
    net: Any = Net().to(device, dtype)
    net.to(memory_format=torch.channels_last)
    x = example(device, dtype)
    plain, light = outcome(fused(net), x), outcome(fused(net, recompute=True), x)
    if dtype is torch.float64:
        torch.testing.assert_close(plain, outcome(net, x))
    assert all(torch.equal(a, b) for a, b in zip(plain, light, strict=True))


def test_the_report() -> None:
    report = torchkiln.fuse(Net(), recompute=True)
    found = {row.name: row.now for row in report.changed}
    again = "conv_bn_act(relu), again in backward"
    block = {"bn1": again, "bn2": again, "bn3": "conv_bn_act(relu, with the residual)"}
    expected = {"bn1": "conv_bn_act(relu, with the max pool)"}
    for i in range(3):
        expected |= {f"layer.{i}.{name}": now for name, now in block.items()}
    assert found == expected | {"layer.2.downsample.1": "conv_bn_act(none)"}
    report = torchkiln.fuse(Plain(), recompute=True)
    assert [row.now for row in report.changed] == [again, "conv_bn_act(relu, with the max pool)"]


@pytest.mark.parametrize("make", [Net, Plain])
def test_second_derivatives(device: torch.device, make: Callable[[], nn.Module]) -> None:
    net = make().to(device, torch.float64)
    x = example(device, torch.float64, 3 if make is Net else 8)

    def both(net: nn.Module) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), *net.parameters()]
        y = net(leaves[0])
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        return [*first, *torch.autograd.grad(total, leaves)]

    torch.testing.assert_close(both(fused(net, recompute=True)), both(net), rtol=1e-6, atol=1e-6)


def test_results_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StorageWeakRef] = []
    compute = recompute.recomputed

    def watched(*args: Any, **options: Any) -> Input:
        found = compute(*args, **options)
        made.append(StorageWeakRef(recompute.tensor_of(found).untyped_storage()))
        return found

    monkeypatch.setattr(recompute, "recomputed", watched)
    y = fused(Net(), recompute=True)(example(torch.device("cpu"), torch.float32))
    assert len(made) == 6
    assert all(storage.expired() for storage in made)
    y.sum().backward()


@pytest.mark.parametrize("name", ["conv2.weight", "bn1.weight"])
def test_a_changed_parameter_is_an_error(name: str) -> None:
    net = Bottleneck(16, 8)
    torchkiln.fuse(net, recompute=True)
    y = net(example(torch.device("cpu"), torch.float32, 16))
    with torch.no_grad():
        net.get_parameter(name).add_(1)
    for asked in (net.conv2.weight, net.conv1.weight):  # the gradient of conv2 runs no other node
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), asked, retain_graph=True)


def halve(_: nn.Module, inputs: tuple[Tensor]) -> None:
    inputs[0].detach().mul_(0.5)


def test_a_hook_that_changes_a_result() -> None:
    net = Bottleneck(16, 8).double()
    x = example(torch.device("cpu"), torch.float64, 16)
    found = []
    for options in ({}, {"recompute": True}):
        made = fused(net, **options)
        made.get_submodule("conv2").register_forward_pre_hook(halve)
        found.append(outcome(made, x))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_other_hooks_for_saved_tensors_see_all() -> None:
    net = Bottleneck(16, 8).double()
    x = example(torch.device("cpu"), torch.float64, 16)
    counts, found = [], []
    for options in ({}, {"recompute": True}):
        made = fused(net, **options)
        seen: list[int] = []

        def pack(tensor: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made(x)
        counts.append(seen)
        again = torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False)
        again.sum().backward()
        found.append([p.grad for p in made.parameters()])
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            made(x)
    assert counts[0] == counts[1]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_nothing_is_left_without_a_backward() -> None:
    net = fused(Bottleneck(16, 8), recompute=True)
    net.get_submodule("bn2").register_forward_hook(lambda *_: None)  # torch runs
    y = net(example(torch.device("cpu"), torch.float32, 16))
    storage = StorageWeakRef(y.untyped_storage())
    del y
    gc.collect()
    assert storage.expired()


def test_replicas_without_parameters() -> None:
    net = fused(Bottleneck(16, 8), recompute=True)
    x = example(torch.device("cpu"), torch.float32, 16)
    replica: Any = net._replicate_for_data_parallel()
    for name, module in net.named_children():
        copied = module._replicate_for_data_parallel()
        for key, value in module._parameters.items():
            setattr(copied, key, value)
        replica._modules[name] = copied
    torch.testing.assert_close(replica(x), copy.deepcopy(net)(x))


def test_copies_pickles_and_other_modes() -> None:
    net = Net()
    x = example(torch.device("cpu"), torch.float32)
    light = fused(net, recompute=True)
    expected = outcome(copy.deepcopy(light), x)
    for other in (copy.deepcopy(light), pickle.loads(pickle.dumps(light))):
        assert all(torch.equal(a, b) for a, b in zip(outcome(other, x), expected, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(light(x), net(x))
        torch.testing.assert_close(light.eval()(x), net.eval()(x))
    grad = torch.func.grad(lambda x: light(x).sum())(x)
    torch.testing.assert_close(grad, torch.func.grad(lambda x: net(x).sum())(x))


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_compiled_without_a_break(options: dict[str, bool]) -> None:
    net = fused(Net(), **options)
    x = example(torch.device("cpu"), torch.float32)
    expected = outcome(copy.deepcopy(net), x)
    compiled: Any = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = outcome(compiled, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
