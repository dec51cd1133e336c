"""1x1 convolutions that compute the moments of their results for the next batch norm."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from torchkiln.ops._conv_moments import conv_with_moments
from torchkiln.ops._conv_routes import Geometry

LAST = torch.channels_last
EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10}
EPS[torch.bfloat16] = 2.0**-7
ops: Any = torch.ops.torchkiln
bn_act: Any = torchkiln.bn_act
batch_norm: Any = F.batch_norm
conv_bn_act: Any = torchkiln.conv_bn_act


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    """float32 convolutions without TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def image(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, device=device, dtype=torch.float64).to(dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def filters(device: torch.device, out: int, x: Tensor) -> Tensor:
    shape = (out, x.shape[1], *[1] * (x.dim() - 2))
    weight = torch.randn(shape, device=device, dtype=torch.float64) / x.shape[1] ** 0.5
    return weight.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "out"),
    [
        ((2, 8, 3, 5), 16),  # less than a tile
        ((3, 72, 17, 31), 200),  # parts of tiles in pixels and channels, and a part of a step of k
        ((5, 64, 16, 16), 64),  # whole tiles of pixels
        ((2, 128, 40), 136),
        ((1, 16, 6, 7, 20), 8),
        ((2, 3, 4, 4), 5),  # no multiples of 8, so torch's convolution runs
        ((1, 8, 1, 1), 8),  # a single pixel
    ],
)
@pytest.mark.parametrize("shift", [0, 100])
def test_result_and_moments(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], out: int, shift: int
) -> None:
    x = image(device, shape, dtype) + shift  # shifts the means of most channels far from 0
    weight = filters(device, out, x)
    y, moments = ops._pixel_conv(x, weight)
    rows, columns = x.movedim(1, -1).double(), weight.flatten(1).double()
    truth, size = rows @ columns.T, rows.abs() @ columns.abs().T
    eps = EPS[dtype]
    bound = (eps * truth.abs() + max(eps * 2.0**-10, 2.0**-52 * shape[1]) * size) * 2
    if dtype is torch.float32:
        bound = 4 * shape[1] * eps * size
    assert ((y.movedim(1, -1).double() - truth).abs() <= bound + 1e-7).all()

    channels = y.movedim(1, 0).flatten(1).double()
    mean, squares = moments[:out], moments[out:-1]
    assert moments[-1] == channels.shape[1]
    deviation = channels.std(1, correction=0)
    assert ((mean - channels.mean(1)).abs() <= 1e-5 * deviation + 1e-12).all()
    right = (channels - channels.mean(1, keepdim=True)).square().sum(1)
    torch.testing.assert_close(squares, right, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("act", ["relu", "none", "gelu"])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_known_moments_give_what_bn_act_gives(
    device: torch.device, dtype: torch.dtype, act: str, *, has_residual: bool
) -> None:
    owned = torch.promote_types(dtype, torch.float32)
    x, residual, grad = (image(device, (4, 24, 5, 7), dtype) for _ in range(3))
    x = x + 3
    weight, bias, mean = (torch.randn(24, device=device, dtype=owned) for _ in range(3))
    leaves = [t.requires_grad_() for t in (x, weight, bias, residual)[: 3 + has_residual]]
    added = residual if has_residual else None
    found, running = [], [[mean.clone(), mean.abs()] for _ in range(2)]
    y = bn_act(*leaves[:3], *running[0], added, act=act, training=True, momentum=0.3)
    found.append([y, *torch.autograd.grad(y, leaves, grad)])
    moments = ops._sync_bn_moments(x.detach())[None]
    y = ops._bn_act_from_moments(
        x, moments, weight, bias, *running[1], added, act, momentum=0.3, eps=1e-5
    )
    found.append([y, *torch.autograd.grad(y, leaves, grad)])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(running[1], running[0])


def test_gradients_of_both_orders(device: torch.device) -> None:
    x = image(device, (2, 3, 2, 3), torch.float64).requires_grad_()
    weight = filters(device, 4, x.detach()).requires_grad_()
    scale, shift = (torch.randn(4, device=device).double().requires_grad_() for _ in range(2))

    def step(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y, moments = ops._pixel_conv(x, weight)
        settings = ("tanh", 0.1, 1e-5)
        found: Tensor = ops._bn_act_from_moments(
            y, moments[None], scale, shift, None, None, None, *settings
        )
        return found

    leaves = (x, weight, scale, shift)
    assert torch.autograd.gradcheck(step, leaves)
    assert torch.autograd.gradgradcheck(step, leaves)


def test_the_ops_pass_opcheck(device: torch.device) -> None:
    x = image(device, (2, 8, 3, 5), torch.float32)
    weight, row = filters(device, 16, x), torch.randn(16, device=device)
    y, moments = ops._pixel_conv(x, weight)
    known = (y, moments[None], row, row, row.clone(), row.abs(), y, "relu", 0.1, 1e-5)
    torch.library.opcheck(ops._pixel_conv.default, (x.requires_grad_(), weight))
    torch.library.opcheck(ops._bn_act_from_moments.default, known)
    torch.library.opcheck(ops._bn_act_from_moments_forward.default, known)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("pixel_conv", {0: torch.zeros(2, 8)}, "x: got shape [2, 8], expected [batch, channels"),
        ("pixel_conv", {1: torch.zeros(4, 7, 1, 1)}, "weight: got shape [4, 7, 1, 1], expected"),
        ("pixel_conv", {1: torch.zeros(4, 8, 3, 3)}, "expected [4, 8, 1, 1]"),
        ("pixel_conv", {1: torch.zeros(4, 8, 1, 1).half()}, "weight: got dtype float16, expected"),
        ("bn_act_from_moments", {1: torch.zeros(1, 17)}, "moments: got float32 [1, 17], expected"),
        ("bn_act_from_moments", {2: torch.zeros(7)}, "weight: got shape [7], expected"),
        (
            "bn_act_from_moments",
            {0: torch.zeros(1, 8, 1, 1)},
            "x: got shape [1, 8, 1, 1], expected more than 1 value",
        ),
    ],
)
def test_bad_input(name: str, change: dict[int, Any], words: str) -> None:
    x, row = torch.zeros(2, 8, 3, 3), torch.ones(8)
    args: dict[str, list[Any]] = {
        "pixel_conv": [x, torch.zeros(4, 8, 1, 1)],
        "bn_act_from_moments": [
            *(x, torch.zeros(1, 17).double(), row, row, None, None, None, "relu", 0.1, 1e-5)
        ],
    }
    for at, value in change.items():
        args[name][at] = value
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        getattr(ops, f"_{name}")(*args[name])
    assert words in str(caught.value)


needs_kernel = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="a kernel for compute capability 9.0",
)


@pytest.fixture
def large() -> tuple[Tensor, Tensor]:
    """A convolution of 2^23 results, for which the kernel is faster than cuDNN."""
    device = torch.device("cuda:0")
    x = image(device, (64, 64, 32, 32), torch.bfloat16)
    return x, filters(device, 128, x)


@needs_kernel
@pytest.mark.cuda
def test_the_choice_of_the_kernel(large: tuple[Tensor, Tensor]) -> None:
    x, weight = large
    plain = Geometry((1, 1), (0, 0), (1, 1), 1)
    assert conv_with_moments(x, weight, None, plain) is not None
    assert conv_with_moments(x, weight, None, plain._replace(padding="same")) is not None
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert conv_with_moments(x, weight.float(), None, plain) is not None
    for other in (
        {"bias": weight[:, 0, 0, 0]},
        {"geometry": plain._replace(stride=(2, 1))},
        {"geometry": plain._replace(padding=(1, 0))},
        {"geometry": plain._replace(groups=2)},
        {"weight": torch.randn(128, 64, 3, 3, device="cuda").bfloat16()},
        {"weight": weight.float()},
        {"x": x.contiguous()},
        {"x": x[:1]},
        {"x": x.float(), "weight": weight.float()},
        {"x": x[:, :32]},
    ):
        call: dict[str, Any] = {"x": x, "weight": weight, "bias": None, "geometry": plain, **other}
        assert conv_with_moments(**call) is None, other


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """The error of each tensor relative to its norm."""
    pairs = zip(found, truth, strict=True)
    return [float(((t.double() - right).norm() / right.norm()).detach()) for t, right in pairs]


@needs_kernel
@pytest.mark.cuda
@pytest.mark.parametrize("has_residual", [False, True])
def test_function_and_module_use_it(large: tuple[Tensor, Tensor], *, has_residual: bool) -> None:
    x, weight = large
    grad = image(x.device, (64, 128, 32, 32), torch.bfloat16)
    residual = grad.flip(0) if has_residual else None
    module: Any = torchkiln.nn.ConvBNAct2d(64, 128, 1, device="cuda")
    module.to(memory_format=LAST)
    with torch.no_grad():
        module.conv.weight.copy_(weight)
        module.bn.weight.uniform_(0.5, 2)
        module.bn.bias.normal_()
    wide = copy.deepcopy(module).double()
    running = [module.bn.running_mean.clone(), module.bn.running_var.clone()]
    own = [t.detach().bfloat16() if t.dim() > 1 else t.detach() for t in module.parameters()]
    leaves = [t.requires_grad_() for t in (x, *own)]

    def by_function() -> list[Tensor]:
        y = conv_bn_act(
            leaves[0], leaves[1], None, *leaves[2:], *running, residual, training=True, momentum=0.0
        )
        return [y, *torch.autograd.grad(y, leaves, grad)]

    def by_module() -> list[Tensor]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = module(x, residual)
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], grad)]

    def by_torch() -> list[Tensor]:
        z = batch_norm(F.conv2d(leaves[0], leaves[1]), *running, *leaves[2:4], True)
        y = F.relu(z if residual is None else z + residual)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    x64 = x.detach().double().requires_grad_()
    y64 = F.relu(wide.bn(wide.conv(x64)) + (0 if residual is None else residual.double()))
    truth = [y64, *torch.autograd.grad(y64, [x64, *wide.parameters()], grad.double())]
    theirs = errors(by_torch(), truth)
    for call in (by_function, by_module):
        found = call()
        assert "computes the moments" in str(torchkiln.explain(call))
        for error, their_error in zip(errors(found, truth), theirs, strict=True):
            assert error <= 1.1 * their_error
        assert all(torch.equal(a, b) for a, b in zip(call(), found, strict=True))


@needs_kernel
@pytest.mark.cuda
def test_a_graph_and_a_stream(large: tuple[Tensor, Tensor]) -> None:
    x, weight = large
    norm = nn.BatchNorm2d(128, device="cuda")

    def step() -> Tensor:
        y: Tensor = conv_bn_act(x, weight, None, norm.weight, norm.bias, training=True)
        return y

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)
