"""Batch norm beyond the contract: running statistics, layouts, saved tensors, torch's modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import torchkiln

bn_act: Any = torchkiln.bn_act
batch_norm: Any = F.batch_norm
LAST = torch.channels_last
SHAPE = (3, 16, 5, 7)
MODULES: list[tuple[type[nn.Module], type[nn.Module], tuple[int, ...]]] = [
    (torchkiln.nn.BatchNormAct1d, nn.BatchNorm1d, (6, 8)),
    (torchkiln.nn.BatchNormAct1d, nn.BatchNorm1d, (6, 8, 5)),
    (torchkiln.nn.BatchNormAct2d, nn.BatchNorm2d, (2, 8, 3, 5)),
    (torchkiln.nn.BatchNormAct3d, nn.BatchNorm3d, (2, 8, 3, 2, 2)),
]


def drawn(device: torch.device, *shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, device=device, **options)


def vectors(device: torch.device, channels: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Weight, bias, running mean and running variance."""
    mean, *rest = (drawn(device, channels, dtype=dtype) for _ in range(4))
    return [*rest[:2], mean, rest[2].abs() + 0.5]


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_moves_the_running_statistics_as_torch(
    device: torch.device, dtype: torch.dtype, momentum: float
) -> None:
    x = drawn(device, *SHAPE, dtype=dtype)
    owned = torch.promote_types(dtype, torch.float32)
    weight, bias, *running = vectors(device, SHAPE[1], owned)
    expected = [t.clone() for t in running]
    for grad in (False, True):
        versions = [t._version for t in (*running, *expected)]
        bn_act(x.requires_grad_(grad), weight, bias, *running, training=True, momentum=momentum)
        batch_norm(x.detach().to(owned), *expected, None, None, True, momentum)
        torch.testing.assert_close(running, expected)
        assert [t._version for t in (*running, *expected)] == versions


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1200, 2, 2), torch.float32),  # read in vectors
        ((3, 1025, 3, 1), torch.float32),  # read in single elements
        ((2, 2048, 8, 16), torch.bfloat16),
        ((4, 600, 40, 40), torch.bfloat16),  # each block has channels of its own
        ((2, 16, 128, 128), torch.bfloat16),  # several blocks per channel
        ((3, 8, 70, 65), torch.float32),
        ((7, 1100, 24, 2), torch.float32),  # planes of 48 pixels
        ((6, 4099, 1, 1), torch.bfloat16),  # one thread adds up the parts of a channel
        ((3, 4099, 2, 1), torch.float32),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_planes_of_many_sizes(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, training: bool
) -> None:
    x, grad = (drawn(device, *shape, dtype=dtype) for _ in range(2))
    weight, bias, *running = vectors(device, shape[1])
    given = [t.requires_grad_() for t in (x, weight, bias)]
    wide = [t.detach().double().requires_grad_() for t in given]
    others = [t.double() for t in running]
    y = bn_act(*given, *running, act="silu", training=training)
    expected = F.silu(batch_norm(wide[0], *others, *wide[1:], training))
    found = (y, *torch.autograd.grad(y, given, grad), *running)
    truth = (expected, *torch.autograd.grad(expected, wide, grad.double()), *others)
    limit = 2e-4 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(found, truth, strict=True):
        assert (ours.double() - theirs).abs().max() < limit * theirs.abs().max()


def torchs_norm(x: Tensor, bn: nn.BatchNorm2d) -> Tensor:
    return batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, training=True)


def our_norm(x: Tensor, bn: nn.BatchNorm2d) -> Tensor:
    return bn_act(x, bn.weight, bn.bias, bn.running_mean, bn.running_var, act="none", training=True)


def our_conv_norm(x: Tensor, bn: nn.BatchNorm2d) -> Tensor:
    eye = torch.eye(x.shape[1], device=x.device)[..., None, None]
    parts = (bn.weight, bn.bias, bn.running_mean, bn.running_var)
    return torchkiln.conv_bn_act(x, eye, None, *parts, act="none", training=True)


def our_norm_in_forward_mode(x: Tensor, bn: nn.BatchNorm2d) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(our_norm(forward_ad.make_dual(x, torch.ones_like(x)), bn))[0]


@pytest.mark.parametrize("second", [our_norm, our_conv_norm, our_norm_in_forward_mode])
@pytest.mark.parametrize("first", [torchs_norm, our_norm])
def test_a_norm_called_twice(
    device: torch.device,
    first: Callable[[Tensor, nn.BatchNorm2d], Tensor],
    second: Callable[[Tensor, nn.BatchNorm2d], Tensor],
) -> None:
    """The second call updates the statistics, and the first can still be differentiated."""
    x = drawn(device, 2, 4, 3, 3).requires_grad_()
    found = []
    for calls in ((first, second), (torchs_norm, torchs_norm)):
        bn = nn.BatchNorm2d(4, device=device)
        one, other = (call(x, bn).square().sum() for call in calls)
        total = one + 2 * other
        found.append((*torch.autograd.grad(total, (x, bn.weight)), *bn.buffers()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_a_fold_is_renewed_when_a_call_has_moved_the_statistics(device: torch.device) -> None:
    """A call in training updates the running statistics without a new version; the fold is new."""
    x, weight = drawn(device, 2, 4, 6, 6), nn.Parameter(drawn(device, 4, 4, 3, 3))
    parts = vectors(device, 4)

    def folded() -> Tensor:
        with torch.no_grad():
            return torchkiln.conv_bn_act(x, weight, None, *parts)

    before = folded()
    assert torch.equal(folded(), before)
    bn_act(drawn(device, 2, 4, 6, 6), *parts, training=True, momentum=0.5)
    y = F.conv2d(x, weight)
    torch.testing.assert_close(folded(), bn_act(y, *parts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_update_is_registered_as_torch_requires(
    device: torch.device, *, requires_grad: bool
) -> None:
    """The schema of _bn_act_update marks the statistics as written; bn_act itself refuses them."""
    x = drawn(device, 3, 4, 2, requires_grad=requires_grad)
    args = (x, *vectors(device, 4))
    torch.library.opcheck(torch.ops.torchkiln._bn_act_update.default, args)
    with pytest.raises(ValueError, match="running_mean: got a tensor in training, expected None"):
        torch.ops.torchkiln.bn_act(*args, training=True)


def test_running_statistics_at_any_strides_and_in_half_precision(device: torch.device) -> None:
    x = drawn(device, *SHAPE, dtype=torch.float16)
    pairs = drawn(device, 2, SHAPE[1], 3, dtype=torch.float16).abs()
    running = list(pairs[..., 1])
    expected = [t.float() for t in running]
    before = pairs.clone()
    bn_act(x, None, None, *running, training=True)
    batch_norm(x.float(), *expected, None, None, True)
    torch.testing.assert_close(running, [t.half() for t in expected], atol=2e-3, rtol=2e-3)
    assert torch.equal(pairs[..., ::2], before[..., ::2])


@pytest.mark.parametrize("act", ["relu", "none", "silu"])
@pytest.mark.parametrize(
    "shape",
    [(2, 16, 4, 6), (2, 3, 5, 5), (3, 8, 1, 1), (1, 1, 4, 4), (40, 8, 3, 5), (2, 24, 5, 7)],
)
@pytest.mark.parametrize("residual", [False, True])
def test_layouts_agree(
    device: torch.device, shape: tuple[int, ...], act: str, *, residual: bool
) -> None:
    """Contiguous, channels-last and mixed arguments have equal results, in the layout of x."""
    weight, bias, *_ = vectors(device, shape[1])
    x, added, grad = (drawn(device, *shape) for _ in range(3))
    found = []
    for formats in ((None, None, None), (LAST, LAST, LAST), (LAST, None, None), (None, LAST, LAST)):
        placed = [
            t if f is None else t.contiguous(memory_format=f)
            for t, f in zip((x, added, grad), formats, strict=True)
        ]
        leaves = [t.detach().requires_grad_() for t in (*placed[:2], weight, bias)]
        second = leaves[1] if residual else None
        y = bn_act(leaves[0], *leaves[2:], None, None, second, act=act, training=True)
        assert y.stride() == leaves[0].stride()
        grads: Any = torch.autograd.grad(y, leaves, placed[2], allow_unused=True)
        assert grads[0].stride() == leaves[0].stride()
        found.append([y.detach(), *(g for g in grads if g is not None)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_transposed_matrix_is_copied(device: torch.device, dtype: torch.dtype) -> None:
    x, grad = (drawn(device, 70, 33, dtype=dtype).t().requires_grad_() for _ in range(2))
    found = []
    for given in (x, x.detach().contiguous().requires_grad_()):
        y = bn_act(given, act="silu", training=True)
        found.append((y, *torch.autograd.grad(y, given, grad)))
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("layout", ["rows", "planes"])
@pytest.mark.parametrize("training", [False, True])
def test_a_small_spread_beside_a_large_mean(
    device: torch.device, layout: str, *, training: bool
) -> None:
    x = 1e4 + 1e-2 * drawn(device, 8, 16, 33, 16)
    if layout == "rows":
        x = x.contiguous(memory_format=LAST)
    wide = x.double()
    mean, var = wide.mean((0, 2, 3)), wide.var((0, 2, 3), correction=0)
    running = None if training else [mean.float(), var.float()]
    used = (mean, var) if running is None else [t.double() for t in running]
    shape = (1, 16, 1, 1)
    truth = (wide - used[0].view(shape)) * (used[1].view(shape) + 1e-12).rsqrt()
    found = bn_act(
        x, None, None, *(running or (None, None)), act="none", training=training, eps=1e-12
    )
    assert float((found - truth).abs().max()) < 2e-5


@pytest.mark.parametrize(("act", "kept"), [("none", 0), ("relu", 1 / 8), ("gelu", 4)])
def test_saves_one_bit_of_the_residual_for_relu(
    device: torch.device, act: str, kept: float
) -> None:
    """Saved are x, statistics, parameters, and for relu one bit per element of the residual."""
    x, residual = (drawn(device, *SHAPE).requires_grad_() for _ in range(2))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        bn_act(x, residual=residual, act=act, training=True)
    own = {t.data_ptr() for t in (x, residual)}
    others = sum(t.nbytes for t in saved if t.data_ptr() not in own) - 3 * 4 * SHAPE[1]
    assert (residual.data_ptr() in {t.data_ptr() for t in saved}) == (kept == 4)
    assert others == (x.numel() * kept if kept < 1 else 0)


def test_gradient_of_the_residual_is_the_incoming_one_without_an_activation(
    device: torch.device,
) -> None:
    x, residual = (drawn(device, *SHAPE).requires_grad_() for _ in range(2))
    grad = drawn(device, *SHAPE)
    y = bn_act(x, residual=residual, act="none", training=True)
    (found,) = torch.autograd.grad(y, residual, grad)
    assert torch.equal(found, grad)


@pytest.mark.parametrize("training", [False, True])
def test_second_derivatives(device: torch.device, *, training: bool) -> None:
    x, residual = (drawn(device, 3, 2, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    weight, bias, *running = vectors(device, 2, torch.float64)

    def function(*args: Tensor) -> Tensor:
        x, weight, bias, residual = args
        stats = (None, None) if training else running
        return bn_act(x, weight, bias, *stats, residual, act="tanh", training=training)

    leaves = (x, weight.requires_grad_(), bias.requires_grad_(), residual)
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_no_images(device: torch.device) -> None:
    x = torch.ones(0, 4, 2, 2, device=device, requires_grad=True)
    weight, bias, *running = vectors(device, 4)
    expected = [t.clone() for t in running]
    y = bn_act(x, weight.requires_grad_(), bias, *running, training=True)
    y.sum().backward()
    assert y.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert all(map(torch.equal, running, expected))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_call_moves_the_running_statistics(device: torch.device, backend: str) -> None:
    if backend == "inductor" and device.type == "cpu":
        pytest.skip("the graph is the same as for aot_eager; compiling it takes long")
    layer: Any = torchkiln.nn.BatchNormAct2d(SHAPE[1], device=device)
    twin: Any = copy.deepcopy(layer)
    compiled: Any = torch.compile(layer, backend=backend, fullgraph=True)
    for step in range(3):
        x = drawn(device, *SHAPE, requires_grad=step > 0)
        found, expected = compiled(x, x.detach()), twin(x, x.detach())
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(twin.named_buffers()))
    assert float(layer.running_var.sub(1).abs().max()) > 0


@pytest.mark.parametrize(("ours", "torchs", "shape"), MODULES)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("tracks", [True, False])
def test_modules_are_torchs(
    device: torch.device,
    ours: Any,
    torchs: Any,
    shape: tuple[int, ...],
    momentum: float | None,
    *,
    tracks: bool,
) -> None:
    """Results and state equal those of torch's modules, in training and in eval mode."""
    made = {"momentum": momentum, "track_running_stats": tracks, "device": device}
    layer, other = ours(8, **made), torchs(8, **made)
    assert isinstance(layer, torchs)
    for _ in range(3):
        x, residual = (drawn(device, *shape) for _ in range(2))
        torch.testing.assert_close(layer(x, residual), (other(x) + residual).relu())
    state = layer.state_dict()
    torch.testing.assert_close(dict(state), dict(other.state_dict()))
    other.load_state_dict(state)
    layer.eval()
    other.eval()
    torch.testing.assert_close(layer(x), other(x).relu())


def test_modules_refuse_other_ranks_and_activations(device: torch.device) -> None:
    layer: Any = torchkiln.nn.BatchNormAct2d(3, device=device)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.ones(2, 3, device=device))
    with pytest.raises(ValueError, match=r"nn.BatchNormAct2d: act: got 'elu', expected one of"):
        torchkiln.nn.BatchNormAct2d(3, act="elu")  # type: ignore[arg-type]
    assert "act='relu'" in repr(layer)


def test_half_precision_with_float32_parameters(device: torch.device) -> None:
    """bfloat16 x, as under autocast: result and gradient are bfloat16, parameters' float32."""
    layer: Any = torchkiln.nn.BatchNormAct2d(16, act="silu", device=device)
    x: Any = drawn(device, *SHAPE, dtype=torch.bfloat16).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == layer.running_mean.dtype == torch.float32


def test_explain_names_the_kernels_and_the_copies(device: torch.device) -> None:
    x = drawn(device, *SHAPE)
    words = str(torchkiln.explain(bn_act, x, training=True))
    assert "copied" not in words
    mixed = drawn(device, *SHAPE).contiguous(memory_format=LAST)
    words = str(torchkiln.explain(bn_act, x, residual=mixed, training=True))
    assert "copied: residual has strides" in words


def test_saved_tensors_in_another_layout(device: torch.device) -> None:
    """Backward takes saved tensors in another layout, as save_on_cpu with pinned memory returns."""
    made = [torch.randn(4, 8, 5, 6, device=device).double() for _ in range(3)]
    x, residual, grad = (t.to(memory_format=torch.channels_last).requires_grad_() for t in made)
    found = []
    for pack in (lambda t: t, lambda t: t.contiguous()):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = torchkiln.bn_act(x, residual=residual, training=True)
        found.append(torch.autograd.grad(y, (x, residual), grad.detach()))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
