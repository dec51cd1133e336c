"""Batch norm over several processes: its ops in one process, and with gloo and NCCL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchkiln
from torchkiln.ops.batch_norm import sync_bn_act

PROGRAM = Path(__file__).with_name("sync_batch_norm_processes.py")
CASES = ("torchs_results", "rounding", "statistics_of_the_batch")
MODELS = ("fused_models", "known_moments", "statistics_of_the_process", "compiled")
ON_GPUS = ("convolved_in_half", "captured", "captured_training")
needs_groups = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)
ops: Any = torch.ops.torchkiln
bn_act: Any = torchkiln.bn_act
Sync: Any = torchkiln.nn.SyncBatchNormAct


def processes(device: str, count: int, store: Path, *cases: str) -> None:
    words = [sys.executable, str(PROGRAM), device, str(count), str(store), *cases]
    done = run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout == "equal\n", done.stderr


@needs_groups
@pytest.mark.parametrize(("count", "cases"), [(2, CASES + MODELS), (4, CASES[:1])])
def test_processes_have_the_results_of_one(
    count: int, cases: tuple[str, ...], tmp_path: Path
) -> None:
    processes("cpu", count, tmp_path / "store", *cases)


@needs_groups
@pytest.mark.cuda
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", [*CASES, *MODELS, *ON_GPUS])
def test_gpus_have_the_results_of_one(count: int, case: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    processes("cuda", count, tmp_path / "store", case)


def drawn(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", ["relu", "none", "gelu"])
@pytest.mark.parametrize("shape", [(7, 24, 4, 2), (9, 5, 3, 7), (11, 13)])
@pytest.mark.parametrize("last", [False, True])
def test_parts_of_a_batch_have_the_results_of_the_batch(
    device: torch.device, dtype: torch.dtype, act: str, shape: tuple[int, ...], *, last: bool
) -> None:
    """In one process, the ops for parts of 0 to 4 images give the results of the whole batch."""
    channels, has_residual = shape[1], last
    x, residual, grad = (drawn(device, shape, dtype) for _ in range(3))
    x = x + 3
    if last and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    owned = torch.promote_types(dtype, torch.float32)
    weight, bias, mean = (drawn(device, (channels,), owned) for _ in range(3))
    running = [mean, mean.abs()]
    expected_running = [t.clone() for t in running]
    leaves = [x, weight, bias, residual] if has_residual else [x, weight, bias]
    leaves = [t.clone().requires_grad_() for t in leaves]
    added = leaves[3] if has_residual else None
    expected = bn_act(*leaves[:3], *expected_running, added, act=act, training=True, momentum=0.3)
    right = torch.autograd.grad(expected, leaves, grad)

    sizes = [0, 4, 1, 0, shape[0] - 5]
    parts = [t.split(sizes) for t in (x, residual, grad)]
    moments = torch.stack([ops._sync_bn_moments(part) for part in parts[0]])
    statistics, count = ops._sync_bn_statistics(x, moments, *running, None, 0.3, 1e-5)
    assert float(count) == x.numel() / channels
    torch.testing.assert_close(running, expected_running)
    outputs, found = [], []
    for one, two, three in zip(*parts, strict=True):
        sum_ = two if has_residual else None
        y, signs = ops._sync_bn_forward(one, statistics, weight, bias, sum_, act)
        keeps = sum_ if act == "gelu" else None
        saved = (weight, bias, keeps, signs if has_residual and act == "relu" else None)
        wanted = [True, True, True, has_residual]
        sums = ops._sync_bn_backward_sums(three, one, statistics, count, *saved, act, wanted)
        outputs.append(y)
        found.append((three, one, saved, sums))
    torch.testing.assert_close(torch.cat(outputs), expected)
    coefficients = torch.stack([sums[0] for *_, sums in found]).sum(0)
    grad_x = [
        ops._sync_bn_backward_input(three, one, statistics, coefficients, *saved, act)
        for three, one, saved, _ in found
    ]
    torch.testing.assert_close(torch.cat(grad_x), right[0])
    for i in (1, 2):
        torch.testing.assert_close(sum(sums[i] for *_, sums in found), right[i])
    if has_residual:
        torch.testing.assert_close(torch.cat([sums[3] for *_, sums in found]), right[3])


def test_the_ops_pass_opcheck(device: torch.device) -> None:
    x, grad = (drawn(device, (4, 6, 5), torch.float32) for _ in range(2))
    row = drawn(device, (6,), torch.float32)
    batches = torch.ones((), dtype=torch.int64, device=device)
    moments = ops._sync_bn_moments(x)[None]
    statistics, count = ops._sync_bn_statistics(x, moments, None, None, None, 0.1, 1e-5)
    _, signs = ops._sync_bn_forward(x, statistics, row, row, x, "relu")
    saved = (row, row, None, signs)
    wanted = [True, True, True, True]
    sums = ops._sync_bn_backward_sums(grad, x, statistics, count, *saved, "relu", wanted)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops._sync_bn_moments, (x,)),
        (ops._sync_bn_statistics, (x, moments, row.clone(), row.clone(), batches, 0.1, 1e-5)),
        (ops._sync_bn_forward, (x, statistics, row, row, x, "relu")),
        (ops._sync_bn_backward_sums, (grad, x, statistics, count, *saved, "relu", wanted)),
        (ops._sync_bn_backward_input, (grad, x, statistics, sums[0], *saved, "relu")),
    ]
    for op, args in calls:
        torch.library.opcheck(op.default, args)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "sync_bn_moments",
            {0: torch.ones(3)},
            "x: got shape [3], expected [batch, channels, ...]",
        ),
        (
            "sync_bn_statistics",
            {1: torch.zeros(1, 6)},
            "moments: got float32 [1, 6], expected float64",
        ),
        ("sync_bn_statistics", {2: None}, "running_var: got a tensor, expected None"),
        ("sync_bn_statistics", {4: torch.ones(())}, "batches: got float32 [], expected an int64"),
        (
            "sync_bn_forward",
            {1: torch.zeros(2, 3)},
            "statistics: got float32 [2, 3], expected float32 [3, 3]",
        ),
        ("sync_bn_forward", {4: torch.zeros(4, 2)}, "residual: got shape [4, 2], expected [4, 3]"),
    ],
)
def test_bad_arguments_are_refused(name: str, change: dict[int, Any], words: str) -> None:
    x, row = torch.ones(4, 3), torch.ones(3)
    good: dict[str, list[Any]] = {
        "sync_bn_moments": [x],
        "sync_bn_statistics": [x, torch.zeros(1, 7).double(), row, row, None, 0.1, 1e-5],
        "sync_bn_forward": [x, torch.zeros(3, 3), row, row, None, "relu"],
    }
    args = good[name]
    for i, value in change.items():
        args[i] = value
    with pytest.raises((ValueError, RuntimeError)) as caught:
        getattr(ops, f"_{name}")(*args)
    assert f"torchkiln.sync_bn_act: {words}" in str(caught.value)


@pytest.fixture
def group(device: torch.device, tmp_path: Path) -> Iterator[Any]:
    """A process group with this process only."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = f"file://{tmp_path}/store"
    dist.init_process_group(backend, init_method=where, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@needs_groups
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_group_of_one_has_the_results_of_bn_act(device: torch.device, group: Any) -> None:
    x, residual = (drawn(device, (3, 5, 4), torch.float32).requires_grad_() for _ in range(2))
    weight = drawn(device, (5,), torch.float32).requires_grad_()
    options: Any = {"momentum": 0.1, "eps": 1e-5, "act": "silu"}
    y = sync_bn_act(x, weight, None, None, None, residual, group=group, **options)
    expected = bn_act(x, weight, None, None, None, residual, training=True, **options)
    torch.testing.assert_close(y, expected)
    leaves = (x, weight, residual)
    found = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), leaves))
    for gradient in found:
        with pytest.raises(NotImplementedError, match="got a second derivative, expected first"):
            gradient.sum().backward(retain_graph=True)
    layer = Sync(5, device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)
    assert "torchkiln::_bn_act_update" in {event.name for event in profile.events()}


@needs_groups
def test_a_step_has_two_collectives_that_modes_see(device: torch.device, group: Any) -> None:
    from torch.distributed.tensor.debug import CommDebugMode  # noqa: PLC0415

    x, row = drawn(device, (3, 5, 4), torch.float32).requires_grad_(), torch.ones(5, device=device)
    options: Any = {"momentum": 0.1, "eps": 1e-5, "act": "relu", "group": group}
    with CommDebugMode() as counted:
        y = sync_bn_act(x, row, row, None, None, None, **options)
        (found,) = torch.autograd.grad(y.square().sum(), x)
    counts = {str(op): count for op, count in counted.get_comm_counts().items()}
    assert counts == {"c10d._allgather_base_": 1, "c10d.allreduce_": 1}
    expected = bn_act(x, row, row, act="relu", training=True)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), x)[0])


@needs_groups
def test_saved_tensors_in_another_layout(device: torch.device, group: Any) -> None:
    """Backward takes saved tensors in another layout, as save_on_cpu with pinned memory returns."""
    made = [drawn(device, (4, 8, 5, 6), torch.float64) for _ in range(3)]
    x, residual, grad = (t.to(memory_format=torch.channels_last).requires_grad_() for t in made)
    options: Any = {"momentum": 0.1, "eps": 1e-5, "act": "relu", "group": group}
    found = []
    for pack in (lambda t: t, lambda t: t.contiguous()):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = sync_bn_act(x, None, None, None, None, residual, **options)
        found.append(torch.autograd.grad(y, (x, residual), grad.detach()))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@needs_groups
def test_transforms_are_refused(device: torch.device, group: Any) -> None:
    x = drawn(device, (3, 5, 4), torch.float32)
    options: Any = {"momentum": 0.1, "eps": 1e-5, "act": "relu", "group": group}
    with pytest.raises(NotImplementedError, match=r"sync_bn_act: got a call under torch\.func"):
        torch.func.grad(lambda x: sync_bn_act(x, None, None, None, None, None, **options).sum())(x)
    y = sync_bn_act(x.requires_grad_(), None, None, None, None, None, **options)
    with pytest.raises(NotImplementedError, match="got gradients with is_grads_batched=True"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape, device=device), is_grads_batched=True)


def test_without_a_group_it_is_bn_act(device: torch.device) -> None:
    layer, twin = Sync(4, device=device), torchkiln.nn.BatchNormAct2d(4, device=device)
    x: Any = drawn(device, (3, 4, 2, 2), torch.float32)
    assert torch.equal(layer(x, x), twin(x, x))
    assert torch.equal(layer.eval()(x), twin.eval()(x))
    assert list(layer.state_dict()) == list(nn.SyncBatchNorm(4).state_dict())
    torch.testing.assert_close(dict(layer.state_dict()), dict(twin.state_dict()))
    with pytest.raises(ValueError, match="expected at least 2D input"):
        layer(x[0, 0, 0])


def test_conversion_keeps_parameters_activations_and_modes(device: torch.device) -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(3, momentum=None, affine=False),
        torchkiln.nn.BatchNormAct2d(3, act="silu"),
        nn.Sequential(nn.SyncBatchNorm(3, track_running_stats=False), nn.ReLU()),
    ).to(device)
    model[1].eval()
    tensors = model.state_dict(keep_vars=True)
    found = Sync.convert_sync_batchnorm(model, "group")
    assert found is model
    layers = [layer for layer in model.modules() if isinstance(layer, Sync)]
    assert [layer.act for layer in layers] == ["none", "silu", "none"]
    assert [layer.training for layer in layers] == [True, False, True]
    assert [layer.momentum for layer in layers] == [None, 0.1, 0.1]
    assert {layer.process_group for layer in layers} == {"group"}
    kept = model.state_dict(keep_vars=True)
    assert list(kept) == list(tensors)
    assert all(kept[name] is tensors[name] for name in tensors)
    assert layers[2].running_mean is None
    single = Sync.convert_sync_batchnorm(nn.BatchNorm1d(3))
    assert isinstance(single, Sync)
