"""Batch norm, activation and max pool as one op, which fused models call in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln
from torchkiln.ops._pool import Windows, takes_pool
from torchkiln.patch.graph.pool import norm_act_pool

ops: Any = torch.ops.torchkiln
bn_act: Any = torchkiln.bn_act
EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SETTINGS = 0.1, 1e-5
POOLS = {
    "3x3 of every other": (3, 2, 1),
    "2x2": (2, 2, 0),
    "2x2 with padding": (2, 2, 1),
    "3x3 without padding": (3, 2, 0),
    "overlapping": (3, 1, 1),
    "gaps": (2, 3, 0),
    "rows and columns": ((5, 2), (3, 1), (2, 0)),
}


def windows_of(pool: tuple[Any, ...]) -> Windows:
    return Windows(*((a, a) if isinstance(a, int) else a for a in pool))


def images(*shape: int, dtype: torch.dtype, steps: int = 0) -> Tensor:
    """Random pixels on the GPU; if ``steps`` > 0, multiples of its inverse, many of them equal."""
    x = torch.randn(*shape, device="cuda")
    x = (x * steps).round() / steps if steps else x
    return x.to(dtype).to(memory_format=torch.channels_last)


def vectors(channels: int, count: int) -> list[Tensor]:
    return [torch.randn(channels, device="cuda") for _ in range(count)]


def indices(places: Tensor, windows: Windows, width: int) -> Tensor:
    """Indices as torch's pool returns them, row * width + column, from places within windows."""
    rows, columns = (torch.arange(n, device="cuda") for n in places.shape[2:])
    row = rows[:, None] * windows.stride[0] - windows.padding[0] + places // windows.kernel[1]
    column = columns * windows.stride[1] - windows.padding[1] + places % windows.kernel[1]
    return row * width + column


@pytest.mark.cuda
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("act", ["relu", "none", "silu"])
@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("steps", [0, 2])
def test_the_numbers_of_both_ops(
    dtype: torch.dtype, act: str, pool: tuple[Any, ...], steps: int
) -> None:
    windows = windows_of(pool)
    x = images(3, 24, 17, 14, dtype=dtype, steps=steps)
    weight, bias, mean = vectors(24, 3)
    running = [[mean.clone(), mean.abs()] for _ in range(2)]
    y, _, places = ops._bn_act_pool_forward(x, weight, bias, *running[0], act, *SETTINGS, *windows)
    # With a residual, bn_act adds moments in the order of the pooling op, so bits are equal.
    zeros = torch.zeros_like(x)
    before = bn_act(x, weight, bias, *running[1], residual=zeros, act=act, training=True)
    expected, at = F.max_pool2d(before, *windows, return_indices=True)
    assert torch.equal(y, expected)
    assert torch.equal(indices(places.long(), windows, 14), at)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(running[0], running[1], rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("act", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", list(EPS))
def test_gradients_against_the_truth(dtype: torch.dtype, act: str, pool: tuple[Any, ...]) -> None:
    windows = windows_of(pool)
    x = images(3, 40, 13, 18, dtype=dtype)
    leaves = [x, *vectors(40, 2)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = ops._bn_act_pool(*leaves, None, None, act, *SETTINGS, *windows)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, grad)

    before = bn_act(*leaves, act=act, training=True)
    _, at = F.max_pool2d(before, *windows, return_indices=True)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    n = F.batch_norm(wide[0], None, None, wide[1], wide[2], training=True)
    z = F.relu(n) if act == "relu" else F.gelu(n)
    picked = z.flatten(2).gather(2, at.flatten(2))
    truth = torch.autograd.grad(picked, wide, grad.double().flatten(2))
    for own, right in zip(found, truth, strict=True):
        size = right.abs().mean() + right.abs()
        eps = max(EPS[own.dtype], EPS[torch.float32] * 16)
        assert ((own.double() - right).abs() <= 4 * eps * size).all()


@pytest.mark.cuda
def test_nan_and_infinity_as_in_torch() -> None:
    windows = windows_of((3, 2, 1))
    x = images(2, 8, 12, 12, dtype=torch.float32)
    inf, nan = float("inf"), float("nan")
    ones, zeros = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    bias = zeros.clone()
    bias[1], bias[2], bias[3] = nan, -inf, inf
    x[0, 4, 3, 5] = nan  # so the channel's statistics are NaN
    y, _, places = ops._bn_act_pool_forward(x, ones, bias, None, None, "none", *SETTINGS, *windows)
    residual = torch.zeros_like(x)  # for equal bits, as above
    before = bn_act(x, ones, bias, residual=residual, act="none", training=True).contiguous()
    # Channels-last max_pool2d returns index 0 for windows of -inf; `before` is contiguous.
    expected, at = F.max_pool2d(before, *windows, return_indices=True)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices(places.long(), windows, 12), at)


@pytest.mark.cuda
def test_second_derivatives() -> None:
    x = images(2, 8, 9, 9, dtype=torch.float32).requires_grad_()
    weight, bias = (v.requires_grad_() for v in vectors(8, 2))
    found = []
    for fused in (True, False):
        if fused:
            y = ops._bn_act_pool(
                x, weight, bias, None, None, "tanh", *SETTINGS, *windows_of((3, 2, 1))
            )
        else:
            y = F.max_pool2d(bn_act(x, weight, bias, act="tanh", training=True), 3, 2, 1)
        first = torch.autograd.grad(y.square().sum(), (x, weight, bias), create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        second = torch.autograd.grad(total, (x, weight, bias))
        found.append([*first, *second])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-4)


@pytest.mark.cuda
def test_results_are_the_same_each_time() -> None:
    x = images(8, 64, 56, 56, dtype=torch.bfloat16).requires_grad_()
    weight, bias = (v.requires_grad_() for v in vectors(64, 2))
    grad = images(8, 64, 28, 28, dtype=torch.bfloat16)

    def step() -> list[Tensor]:
        y = ops._bn_act_pool(x, weight, bias, None, None, "relu", *SETTINGS, *windows_of((3, 2, 1)))
        return [y, *torch.autograd.grad(y, (x, weight, bias), grad)]

    first = step()
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))


@pytest.mark.cuda
def test_strided_gradients_and_unaligned_images() -> None:
    windows = windows_of((2, 2, 0))
    flat = torch.randn(1 + 2 * 10 * 10 * 16, device="cuda").bfloat16()
    x = flat[1:].view(2, 10, 10, 16).permute(0, 3, 1, 2)  # 2 bytes after an aligned address
    grad = torch.randn(2, 16, 5, 5, device="cuda").bfloat16()
    found = []
    for each, g in ((x, grad), (x.clone(), grad.to(memory_format=torch.channels_last))):
        leaf = each.detach().requires_grad_()
        y = ops._bn_act_pool(leaf, None, None, None, None, "relu", *SETTINGS, *windows)
        found.append([y, *torch.autograd.grad(y, leaf, g)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.cuda
def test_saved_tensors_in_another_layout() -> None:
    x = images(2, 16, 9, 9, dtype=torch.float32).requires_grad_()
    grad = images(2, 16, 5, 5, dtype=torch.float32)
    found = []
    for pack in (lambda t: t, lambda t: t.contiguous()):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = ops._bn_act_pool(
                x, None, None, None, None, "relu", *SETTINGS, *windows_of((3, 2, 1))
            )
        found.append(torch.autograd.grad(y, x, grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_the_module_call_takes_the_kernel(*, compiled: bool) -> None:
    norm, pool = nn.BatchNorm2d(16).cuda(), nn.MaxPool2d(3, 2, 1)
    x = images(4, 16, 20, 20, dtype=torch.bfloat16)
    call = torch.compile(norm_act_pool, fullgraph=True) if compiled else norm_act_pool
    found = call(norm, pool, x, "relu")
    with torch.profiler.profile(acc_events=True) as profile:
        found = call(norm, pool, x, "relu")
    assert any("bn_act_pool" in event.name for event in profile.events())
    other = nn.BatchNorm2d(16).cuda()
    for _ in range(2):
        expected = pool(F.relu(other(x.float()))).bfloat16()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(norm.state_dict(), other.state_dict())


def call_with(pool: nn.MaxPool2d, x: Tensor) -> tuple[Tensor, Tensor]:
    norm = nn.BatchNorm2d(x.shape[1]).to(x.device, x.dtype)
    expected = pool(bn_act(x, norm.weight, norm.bias, training=True))
    return norm_act_pool(norm, pool, x, "relu"), expected


@pytest.mark.parametrize(
    ("pool", "channels"),
    [
        (nn.MaxPool2d(3, 2, 1), 8),
        (nn.MaxPool2d(3, 2, 1, ceil_mode=True), 8),
        (nn.MaxPool2d(2, 2, dilation=2), 8),
        (nn.MaxPool2d(2), 12),
    ],
    ids=repr,
)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_others_are_called_one_by_one(
    device: torch.device, pool: nn.MaxPool2d, channels: int, layout: torch.memory_format
) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(2, channels, 9, 9, device=device, dtype=dtype)
        torch.testing.assert_close(*call_with(pool, x.to(memory_format=layout)))


def test_takes_pool_needs_a_gpu() -> None:
    x = torch.zeros(2, 8, 4, 4).to(memory_format=torch.channels_last)
    assert not takes_pool(x, windows_of((3, 2, 1)))


@pytest.mark.parametrize(
    ("x", "windows", "words"),
    [
        (torch.zeros(2, 8, 4, 4), ((3, 3), (2, 2), (1, 1)), "x: got float32 [2, 8, 4, 4] on cpu"),
        (torch.zeros(2, 8, 4), ((3, 3), (2, 2), (1, 1)), "x: got shape [2, 8, 4], expected"),
        (torch.zeros(2, 8, 2, 2), ((3, 3), (2, 2), (0, 0)), "holds a window of 3 x 3"),
        (torch.zeros(2, 8, 4, 4), ((3, 3), (2, 2), (2, 1)), "padding: got [2, 1], expected at"),
        (torch.zeros(2, 8, 4, 4), ((3, 3), (0, 2), (1, 1)), "stride: got [0, 2], expected two"),
        (torch.zeros(1, 8, 1, 1), ((1, 1), (1, 1), (0, 0)), "expected more than 1 value"),
    ],
)
def test_bad_input(x: Tensor, windows: Any, words: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        ops._bn_act_pool(x, None, None, None, None, "relu", *SETTINGS, *windows)
    assert words in str(caught.value)
