"""Group norm against torch's: statistics, layouts, the module, a model with replaced forwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkiln
from torchkiln.typing import Activation

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.cuda]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
def test_a_mean_far_from_0_loses_no_digits(device: str, last: bool) -> None:
    x = torch.randn(3, 12, 17, 19, device=device) + 3e4
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    expected = F.group_norm(x.double(), 4)
    found = torchkiln.group_norm(x, 4)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 24, 5, 3), (3, 40, 33, 65), (2, 6, 3), (5, 8)])
def test_the_layout_is_that_of_x(device: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device).movedim(1, -1).contiguous().movedim(-1, 1)
    x.requires_grad_()
    y = torchkiln.group_norm(x, 2, act="silu")
    assert y.movedim(1, -1).is_contiguous()
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert grad.movedim(1, -1).is_contiguous()
    plain = x.detach().contiguous().requires_grad_()
    other = torchkiln.group_norm(plain, 2, act="silu")
    (expected,) = torch.autograd.grad(other, plain, torch.ones_like(other))
    torch.testing.assert_close(y, other)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "groups", "last"),
    [
        ((2, 2 * 40960), 2, False),  # 16-byte vectors, few samples
        ((70, 40964), 1, False),  # float16: 8-byte vectors; samples in parts
        ((3, 40001), 1, False),  # single elements
        ((9, 700, 7, 7), 1, False),  # pixels
        ((17, 6, 5462), 1, False),  # many pixels, not whole vectors
        ((20, 6, 8, 6), 2, False),  # teams; each vector has one channel
        ((33, 3, 1200), 1, False),
        ((1, 5003, 3, 3), 1, True),  # blocks share the channels of a group
        ((2, 4099, 5), 4099, True),  # a thread adds the channels of a group
        ((5, 2000, 11), 1000, True),
        ((37, 8202, 7), 2, True),  # groups of a pixel: single elements
        ((5, 16400, 3, 5), 4, True),  # 8-byte vectors of float16, and parts
        ((30, 4096, 1, 16), 1, True),  # 16-byte vectors
    ],
)
@pytest.mark.parametrize(
    ("dtype", "act", "most"),
    [("float32", "none", 2e-5), ("float16", "silu", 2e-3), ("bfloat16", "gelu", 1e-2)],
)
def test_groups_of_many_elements_and_many_groups(
    device: str,
    shape: tuple[int, ...],
    groups: int,
    last: bool,
    dtype: str,
    act: Activation,
    most: float,
) -> None:
    if device == "cpu" and act != "none":
        pytest.skip("the kernels of the CPU do not depend on the length of a group")
    generator = torch.Generator(device).manual_seed(0)
    x, grad = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.float64) + 1
        for _ in range(2)
    )
    if last:
        x, grad = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, grad))
    grad /= 4  # so that float16 holds the sums
    weight, bias = torch.randn(2, shape[1], generator=generator, device=device, dtype=torch.float64)
    given = [t.to(getattr(torch, dtype)).requires_grad_() for t in (x, weight, bias)]
    y = torchkiln.group_norm(given[0], groups, given[1], given[2], act=act)
    found = torch.autograd.grad(y, given, grad.to(y.dtype))
    truth = [t.detach().double().requires_grad_() for t in given]
    z = F.group_norm(truth[0], groups, truth[1], truth[2])
    wide = z if act == "none" else getattr(F, act)(z)
    expected = torch.autograd.grad(wide, truth, grad.to(y.dtype).double())
    for ours, theirs in zip((y, *found), (wide, *expected), strict=True):
        assert (ours.double() - theirs).abs().max() < most * theirs.abs().max()
    again = torchkiln.group_norm(given[0], groups, given[1], given[2], act=act)
    for one, other in zip(found, torch.autograd.grad(again, given, grad.to(y.dtype)), strict=True):
        assert torch.equal(one, other)


def test_the_module_is_torchs() -> None:
    theirs = nn.GroupNorm(3, 12, eps=1e-3)
    nn.init.normal_(theirs.weight)
    ours = torchkiln.nn.GroupNorm(3, 12, eps=1e-3, act="silu")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 12, 7)
    torch.testing.assert_close(ours(x), F.silu(theirs(x)))
    assert repr(ours) == f"{repr(theirs)[:-1]}, act='silu')"
    without = torchkiln.nn.GroupNorm(3, 12, bias=False)
    assert list(without.state_dict()) == ["weight"]
    torch.testing.assert_close(without(x), F.group_norm(x, 3))
    with pytest.raises(ValueError, match=r"torchkiln\.nn\.GroupNorm: act: got 'mish', expected"):
        torchkiln.nn.GroupNorm(3, 12, act="mish")  # type: ignore[arg-type]


def test_replace_takes_torchs_module() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), nn.GroupNorm(2, 12, affine=False)
    )
    x = torch.randn(2, 3, 9, 9)
    expected = model(x)
    report = torchkiln.replace(model)
    assert [report[name].now for name in ("1", "2")] == ["group_norm", "group_norm"]
    torch.testing.assert_close(model(x), expected)


@pytest.mark.cuda
@pytest.mark.parametrize(("pixels", "calls"), [(7, True), (17, False)])
def test_groups_of_few_pixels_have_their_own_moments(pixels: int, calls: bool) -> None:
    x = torch.randn(64, pixels, 4099, device="cuda").movedim(-1, 1)
    found = str(torchkiln.explain(torchkiln.group_norm, x, 1))
    assert ("merge_pixels" in found) == calls


def check_on_a_cpu(shape: tuple[int, ...], groups: int, dtype: torch.dtype, last: bool) -> None:
    """Compare values and gradients with float64, and the bits of one and two threads."""
    x = (torch.randn(shape) + 3).to(dtype)
    weight, bias = (torch.randn(shape[1]).to(dtype).requires_grad_() for _ in range(2))
    grad = torch.randn(shape).to(dtype)
    if last:
        x, grad = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, grad))
    x.requires_grad_()
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            y = torchkiln.group_norm(x, groups, weight, bias, act="silu")
            found.append([y, *torch.autograd.grad(y, (x, weight, bias), grad)])
        finally:
            torch.set_num_threads(before)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y = F.silu(F.group_norm(wide[0], groups, wide[1], wide[2]))
    expected = [y, *torch.autograd.grad(y, wide, grad.double())]
    for one, other, truth in zip(*found, expected, strict=True):
        assert torch.equal(one, other)
        error = (one.double() - truth).abs().max()
        # Results are rounded once, sums of n terms of size 1 in float32: their size is sqrt(n).
        size, usual = truth.abs().max().clamp(1), (x.numel() / truth.numel()) ** 0.5
        eps = torch.finfo(dtype).eps
        assert error < 4 * (eps * size + torch.finfo(torch.float32).eps * usual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((70001, 1), 1),  # tiles of groups
        ((9001, 6), 3),
        ((40, 500, 2), 500),  # more groups than a tile has rows
        ((1, 30001, 3), 30001),
        ((9, 40, 3), 2),  # groups as rows
        ((70, 1300), 2),
        ((2, 300, 31), 1),
    ],
)
def test_few_pixels_on_a_cpu(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    check_on_a_cpu(shape, groups, dtype, last=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((301, 1, 79), 1),  # several groups per run, and samples
        ((37, 6, 33), 2),
        ((5, 4, 513), 2),  # planes of several runs
        ((2, 40, 2048), 1),  # too many elements to keep their gradients
    ],
)
def test_planes_on_a_cpu(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    check_on_a_cpu(shape, groups, dtype, last=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((1, 3, 4099), 3),  # several pixels per run; with two threads a part of the groups
        ((1, 48, 3001), 3),
        ((7, 5, 9), 1),  # a run has all pixels
        ((65, 64, 8), 2),
        ((3, 96, 2049), 3),  # blocks of rows
        ((5, 600, 4), 3),  # more channels than a run has elements
        ((2, 1200, 3), 2),  # pixels of several runs
    ],
)
def test_channels_last_on_a_cpu(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    check_on_a_cpu(shape, groups, dtype, last=True)


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_squares_beyond_the_range_of_float32(scale: float) -> None:
    x = torch.randn(2, 4, 99) * scale
    found = torchkiln.group_norm(x, 2, eps=0.0)
    expected = F.group_norm(x.double(), 2, eps=0.0)
    torch.testing.assert_close(found, expected.float())


def test_an_infinite_weight_of_short_groups() -> None:
    """Tiles that are not full have no row whose argument is inf * 0."""
    weight = torch.tensor([1.0, torch.inf, 2.0, 1.0], requires_grad=True)
    bias = torch.zeros(4, requires_grad=True)
    x, grad = torch.randn(3, 4, 3), torch.randn(3, 4, 3)
    y = torchkiln.group_norm(x, 2, weight, bias, act="sigmoid")
    wide = (F.group_norm(x.double(), 2) * weight[:, None] + bias[:, None]).sigmoid()
    found = torch.autograd.grad(y, [weight, bias], grad)
    expected = torch.autograd.grad(wide, [weight, bias], grad.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
