"""Batch norm of channels-last images in one kernel, which keeps what it read in registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln

bn_act: Any = torchkiln.bn_act
batch_norm: Any = F.batch_norm
pytestmark = pytest.mark.cuda

# Pixels and channels. An H100 runs 264 blocks at once, whose threads keep up to 26 rows.
SIZES = {
    "all rows stay": (20001, 64),
    "rows go through the ring": (1_900_001, 8),
    "tiles of columns": (12_001, 2048),
    "odd tiles of columns": (60_003, 1000),
    "threads without columns": (200_003, 320),
    "fewer rows than threads": (5, 8),
}
sizes = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def arguments(size: tuple[int, int], dtype: torch.dtype, mean: float) -> list[Tensor]:
    """x with channel means of about ``mean`` standard deviations, weight and bias."""
    pixels, channels = size
    x = torch.randn(1, pixels, 1, channels, device="cuda")
    x += mean * torch.randn(channels, device="cuda")
    weight, bias = torch.randn(2, channels, device="cuda")
    images = x.to(dtype).movedim(-1, 1)
    assert images.is_contiguous(memory_format=torch.channels_last)
    return [images.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]


def with_gradients(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@sizes
@dtypes
@pytest.mark.parametrize("act", ["none", "silu"])
@pytest.mark.parametrize("has_residual", [False, True])
def test_against_the_truth(
    size: tuple[int, int], dtype: torch.dtype, act: str, has_residual: bool
) -> None:
    torch.manual_seed(7)
    inputs = arguments(size, dtype, mean=3)
    grad = torch.randn_like(inputs[0])
    residual = torch.randn_like(inputs[0]) if has_residual else None
    running = [torch.zeros(size[1], device="cuda"), torch.ones(size[1], device="cuda")]
    out = bn_act(*inputs, *running, residual=residual, act=act, training=True, momentum=0.25)
    found = with_gradients(out, inputs, grad)

    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = [torch.zeros(size[1], device="cuda").double() for _ in range(2)]
    expected[1] += 1
    z = batch_norm(wide[0], *expected, wide[1], wide[2], training=True, momentum=0.25)
    if residual is not None:
        z = z + residual.double()
    truth = with_gradients(F.silu(z) if act == "silu" else z, wide, grad)

    limits = torch.finfo(dtype)
    rounding, step = 0.51 * limits.eps, limits.smallest_normal * limits.eps
    for ours, right in zip(found[:2], truth[:2], strict=True):  # results rounded to dtype
        scale = right.abs().amax(dim=(0, 2, 3), keepdim=True)
        allowed = rounding * right.abs() + 2e-6 * scale + step
        assert ((ours.double() - right).abs() <= allowed).all()
    for ours, right in zip(found[2:], truth[2:], strict=True):  # sums over all pixels
        assert (ours.double() - right).norm() <= 1e-5 * right.norm() + 1e-5 * size[0] ** 0.5
    torch.testing.assert_close([each.double() for each in running], expected, rtol=1e-6, atol=1e-6)


@dtypes
def test_a_mean_of_many_deviations(dtype: torch.dtype) -> None:
    """A mean of 250 deviations costs no digits, as sums are of distances to a nearby element."""
    x, weight, bias = arguments((300_001, 64), torch.float32, mean=0)
    x = (x.detach() * 4 + 1000).to(dtype).contiguous(memory_format=torch.channels_last)
    found = bn_act(x, weight, bias, act="none", training=True)
    wide = [tensor.detach().double() for tensor in (x, weight, bias)]
    truth = batch_norm(wide[0], None, None, *wide[1:], training=True)
    eps = torch.finfo(dtype).eps
    assert ((found.double() - truth).abs() <= 0.51 * eps * truth.abs() + 2e-5).all()


@sizes
def test_every_run_has_the_same_bits(size: tuple[int, int]) -> None:
    inputs = arguments(size, torch.bfloat16, mean=1)
    grad = torch.randn_like(inputs[0])

    def results() -> list[Tensor]:
        return with_gradients(bn_act(*inputs, act="relu", training=True), inputs, grad)

    first = results()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))


def test_in_a_graph() -> None:
    x, weight, bias = (t.detach() for t in arguments((100_003, 64), torch.bfloat16, mean=1))
    running = [torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        bn_act(x, weight, bias, *running, act="relu", training=True)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = bn_act(x, weight, bias, *running, act="relu", training=True)
    x.copy_(torch.randn_like(x))
    before = [each.clone() for each in running]
    graph.replay()
    assert torch.equal(y, bn_act(x, weight, bias, *before, act="relu", training=True))
    assert all(torch.equal(a, b) for a, b in zip(running, before, strict=True))


def test_explain_names_one_kernel() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs 227 KiB of shared memory for each multiprocessor")
    inputs = arguments((100_003, 64), torch.bfloat16, mean=1)
    told = torchkiln.explain(bn_act, *inputs, act="relu", training=True)
    assert told.backward is not None
    names = [kernel.name for part in (told.forward, told.backward) for kernel in part.kernels]
    assert names == ["resident_forward", "resident_backward"]
