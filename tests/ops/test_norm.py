"""Norms beyond the contract: a large mean with a small variance, special values, saved tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dtypes import FLOATING, HALF, every_dtype
from norms import every_op, name
from torch import Tensor

import torchkiln
from torchkiln.testing.compare import bits
from torchkiln.testing.contract.dispatch import Recorder
from torchkiln.testing.contract.repeat import threads
from torchkiln.testing.specs.norm import ADD_LAYER_NORM, LAYER_NORM

Norm = Callable[..., Tensor]
PAIRS: list[tuple[Norm, Norm]] = [
    (torchkiln.layer_norm, F.layer_norm),
    (torchkiln.rms_norm, F.rms_norm),
]
both = pytest.mark.parametrize(("ours", "torchs"), PAIRS, ids=name)


def errors(found: Tensor, truth: Tensor) -> float:
    """The largest error relative to the largest value."""
    return float((found.double() - truth).abs().max() / truth.abs().max())


def with_gradients(function: Norm, grad: Tensor, *leaves: Tensor, **options: Any) -> list[Tensor]:
    """The output and the gradients of x, weight and bias; the last dimension is normalized."""
    x, *rest = (leaf.detach().clone().requires_grad_() for leaf in leaves)
    out = function(x, x.shape[-1:], *rest, **options)
    return [out.detach(), *torch.autograd.grad(out, [x, *rest], grad.to(out.dtype))]


@pytest.mark.parametrize("mean", [0.0, 1e4, -1e6])
@pytest.mark.parametrize(
    "columns", [31, 1024, 5000, 40001, pytest.param(300001, marks=pytest.mark.cuda)]
)
def test_a_spread_of_one_beside_a_large_mean(
    device: torch.device, mean: float, columns: int
) -> None:
    """A mean up to 1e6 times the deviation costs no digits: the variance sums differences from it.

    The remaining error is the rounding of x, which the float64 truth contains, too.
    """
    x = torch.randn(3, columns, dtype=torch.float64).add(mean).float().to(device)
    weight, bias = torch.randn(columns, device=device), torch.randn(columns, device=device)
    grad = torch.randn_like(x)
    found = with_gradients(torchkiln.layer_norm, grad, x, weight, bias)
    truth = with_gradients(F.layer_norm, grad, *(t.double() for t in (x, weight, bias)))
    # An error of the mean, at most half a rounding step, shifts every element.
    step = torch.finfo(torch.float32).eps
    for one, expected in zip(found, truth, strict=True):
        assert errors(one, expected) <= step * (20 + abs(mean))
    assert errors(found[0], truth[0]) <= step * (8 + abs(mean) / 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [6, 3001])
@pytest.mark.parametrize("eps", [1e-5, 1e-10])
def test_half_precision_far_from_zero(
    device: torch.device, dtype: torch.dtype, rows: int, eps: float
) -> None:
    """Half precision rows near 1e4, also constant ones, have exact differences from the mean."""
    x = torch.randn(rows, 64, dtype=torch.float64).mul(20).add(1e4)
    x[::2] = 1e4
    x = x.to(dtype).to(device)
    grad = torch.randn(x.shape, device=device).mul(1e-3).to(dtype)
    weight, bias = torch.randn(2, 64, device=device)
    found = with_gradients(torchkiln.layer_norm, grad, x, weight, bias, eps=eps)
    wide = [t.double() for t in (x, weight, bias)]
    truth = with_gradients(F.layer_norm, grad.double(), *wide, eps=eps)
    for one, expected in zip(found[:2], truth[:2], strict=True):
        scale = expected.abs().amax(-1, keepdim=True)
        assert ((one.double() - expected).abs() <= 4 * torch.finfo(dtype).eps * scale).all()
    for one, expected in zip(found[2:], truth[2:], strict=True):
        assert errors(one, expected) <= 1e-3


@every_dtype
@pytest.mark.parametrize("rows", [6, 3001])
def test_one_column_has_no_gradient(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    """With one column the gradient of x is 0, however small eps is."""
    x = torch.randn(rows, 1, device=device).mul(1e4).to(dtype)
    weight, bias = torch.randn(2, 1, device=device).to(dtype)
    out, of_x, of_weight, of_bias = with_gradients(
        torchkiln.layer_norm, torch.randn_like(x), x, weight, bias, eps=1e-12
    )
    assert torch.equal(out, bias.expand(rows, 1))
    assert not of_x.any()
    assert not of_weight.any()
    assert of_bias.isfinite().all()


@every_dtype
@both
@pytest.mark.parametrize("columns", [3, 64, 1000, 40001])
def test_special_values(
    device: torch.device, dtype: torch.dtype, ours: Norm, torchs: Norm, columns: int
) -> None:
    """Rows with infinities and NaN equal those of torch on the CPU; other rows are not affected.

    On GPUs torch's RMS norm sets a whole row with an infinity to NaN, not just that element.
    """
    x = torch.randn(7, columns, dtype=dtype, device=device)
    for row, value in ((1, math.inf), (2, -math.inf), (3, math.nan)):
        x[row, columns // 2] = value
    x[4] = math.inf
    x[5] = 0
    for grad in (torch.ones_like(x), torch.randn_like(x)):
        weight = torch.randn(columns, dtype=dtype, device=device)
        found = with_gradients(ours, grad, x, weight, eps=1e-5)[:2]
        wide = grad.double(), x.double(), weight.double()
        expected = with_gradients(torchs, *(t.cpu() for t in wide), eps=1e-5)[:2]
        for one, there_on in zip(found, expected, strict=True):
            other = there_on.to(device)
            assert torch.equal(one.isnan(), other.isnan())
            there = ~other.isnan()
            tolerance = 64 * torch.finfo(dtype).eps
            scale = float(other[there].abs().max()) if there.any() else 1.0
            torch.testing.assert_close(
                one[there].double(), other[there], rtol=tolerance, atol=tolerance * scale
            )


@every_dtype
@both
def test_large_and_small_numbers(
    device: torch.device, dtype: torch.dtype, ours: Norm, torchs: Norm
) -> None:
    """float16's largest numbers do not overflow, as squares are computed in float32."""
    largest = 60000.0 if dtype == torch.float16 else 1e18
    for size in (largest, 1e-6):
        x = (torch.randn(5, 300, device=device).clamp(-1, 1) * size).to(dtype)
        found = ours(x, (300,), eps=1e-30)
        expected = torchs(x.double(), (300,), eps=1e-30)
        assert errors(found, expected) <= 8 * torch.finfo(dtype).eps


@both
@pytest.mark.parametrize("columns", [1, 2, 257, 50257, 2**18, 2**20 - 1, 2**20, 2**20 + 1])
def test_lengths_of_rows(device: torch.device, ours: Norm, torchs: Norm, columns: int) -> None:
    """Rows of 1 to more than 2^20 columns agree with float64 in forward and backward."""
    x = torch.randn(3, columns, device=device)
    weight = torch.randn(columns, device=device)
    grad = torch.randn_like(x)
    # In a row of one column, the variance is 0, so that only eps remains.
    found = with_gradients(ours, grad, x, weight, eps=1e-3)
    wide = with_gradients(torchs, grad, x.double(), weight.double(), eps=1e-3)
    for one, expected in zip(found, wide, strict=True):
        scale = expected.abs().max().clamp(min=1e-3)
        assert (one - expected).abs().max() <= 2e-6 * scale + 2e-6


@every_op
def test_nothing_to_normalize(device: torch.device, spec: Any) -> None:
    """Without rows, gradients of parameters are 0; without columns, everything is empty."""
    for shape in ((0, 5), (5, 0), (2, 0, 3)):
        sample = spec.bench(device, torch.float32, shape[-2:])
        x = torch.empty(shape, device=device)
        rows = [x for i in sample.positions if sample.args[i].dim() == 2]
        kept = [sample.args[i] for i in sample.positions if sample.args[i].dim() == 1]
        leaves = [t.detach().clone().requires_grad_() for t in (*rows, *kept)]
        result = spec.op(*leaves[: len(rows)], shape[-1:], *leaves[len(rows) :])
        out = result[0] if isinstance(result, tuple) else result
        assert out.shape == shape
        for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
            assert grad.shape == leaf.shape
            assert not grad.count_nonzero()


@pytest.mark.parametrize("dtype", HALF, ids=name)
@every_op
def test_float32_parameters_keep_their_digits(
    device: torch.device, dtype: torch.dtype, spec: Any
) -> None:
    """float32 parameters of half precision x are read, and their gradients written, in float32."""
    rows, columns = 2053, 5
    ((_, sample),) = spec.bench_variants(device, dtype, (rows, columns))
    leaves = spec.leaves(sample)
    result = leaves.call(spec.op)
    out = result[0] if isinstance(result, tuple) else result
    assert out.dtype == dtype
    kept = [leaves.args[i] for i in leaves.positions if leaves.args[i].dim() == 1]
    grads = torch.autograd.grad(out.sum(), kept)
    assert {g.dtype for g in grads} == {torch.float32}
    if len(kept) == 2:  # neither half dtype has 2053
        assert grads[1].tolist() == [float(rows)] * columns
    doubled = sample
    for i in sample.positions:
        if sample.args[i].dtype == torch.float32:
            doubled = doubled.substitute(i, sample.args[i] * (1 + 2**-10))
    assert not torch.equal(out, spec.leaves(doubled).call(spec.op)[0].expand_as(out))


@every_dtype
def test_offset_is_added_to_the_weight(device: torch.device, dtype: torch.dtype) -> None:
    """The offset is added in float32: no half dtype has 1 + 2**-12."""
    x = torch.randn(64, 33, device=device, dtype=dtype)
    weight = torch.full((33,), 2.0**-12, device=device, dtype=dtype)
    plain = torchkiln.rms_norm(x.double(), 33, eps=1e-6)
    found = torchkiln.rms_norm(x, 33, weight, 1e-6, offset=1.0)
    truth = plain * (1 + 2.0**-12)
    size = truth.abs().clamp_min(torch.finfo(dtype).tiny)  # subnormal steps have one size
    steps = (found.double() - truth).abs() / size / torch.finfo(dtype).eps
    assert steps.max() <= (0.51 if dtype in HALF else 4)
    assert torch.equal(
        torchkiln.rms_norm(x, 33, None, 1e-6, offset=1.0), torchkiln.rms_norm(x, 33, None, 1e-6)
    )
    assert torch.equal(
        torchkiln.rms_norm(x, 33, weight, 1e-6, offset=1.0),
        torchkiln.add_rms_norm(x, torch.zeros_like(x), 33, weight, 1e-6, offset=1.0)[0],
    )


@every_dtype
def test_default_eps_is_that_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    """The default eps is torch's: results agree where squares are as small as eps."""
    size = 1e-8 if dtype == torch.float64 else 3e-4
    x = (torch.randn(5, 100, device=device, dtype=torch.float64) * size).to(dtype)
    found, expected = torchkiln.rms_norm(x, 100), F.rms_norm(x, (100,))
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)
    added, _ = torchkiln.add_rms_norm(x, torch.zeros_like(x), 100)
    assert torch.equal(added, found)


@every_op
@every_dtype
def test_a_sum_is_normed_as_the_rows_it_gives(
    device: torch.device, dtype: torch.dtype, spec: Any
) -> None:
    """add_* returns the sum that torch rounds, and the norm of this sum, bit for bit."""
    if not spec.name.startswith("add_"):
        pytest.skip("has no residual")
    sample = spec.typical(device, dtype)
    x, residual, *rest = sample.args
    y, total = sample.call(spec.op)
    assert torch.equal(bits(total), bits(x + residual))
    alone = getattr(torchkiln, spec.name.removeprefix("add_"))
    assert torch.equal(bits(y), bits(alone(total, *rest, **sample.kwargs)))


@every_op
def test_several_dimensions_are_one(device: torch.device, spec: Any) -> None:
    """Normalizing [3, 5] of [2, 7, 3, 5] equals normalizing 15 of [2, 7, 15]."""
    sample = spec.bench(device, torch.float32, (14, 15))
    flat = sample.call(spec.op)
    shaped = [
        a.reshape(2, 7, 3, 5) if isinstance(a, Tensor) and a.dim() == 2 else a for a in sample.args
    ]
    shaped = [a.reshape(3, 5) if isinstance(a, Tensor) and a.dim() == 1 else a for a in shaped]
    shaped = [(3, 5) if isinstance(a, tuple) else a for a in shaped]
    found = spec.op(*shaped)
    pairs = zip(found, flat, strict=True) if isinstance(found, tuple) else [(found, flat)]
    for one, other in pairs:
        assert torch.equal(one.reshape(other.shape), other)


def test_a_size_may_be_a_number(device: torch.device) -> None:
    """normalized_shape may be a number, a list or a torch.Size, eager and traced."""
    x, weight = torch.randn(4, 6, device=device), torch.randn(6, device=device)
    expected = F.layer_norm(x, (6,), weight)
    for shape in (6, (6,), [6], torch.Size([6])):
        torch.testing.assert_close(torchkiln.layer_norm(x, shape, weight), expected)
        torch.compiler.reset()
        compiled: Any = torch.compile(torchkiln.layer_norm, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, shape, weight), expected)


@pytest.mark.parametrize("wanted", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
def test_backward_computes_what_is_wanted(
    device: torch.device, wanted: tuple[int, int, int]
) -> None:
    """Only wanted gradients are computed; either addend needs the gradient of the sum."""
    flags = [bool(w) for w in wanted]
    x, weight, bias = (
        torch.randn(shape, device=device, requires_grad=flag)
        for shape, flag in zip(((4, 6), (6,), (6,)), flags, strict=True)
    )
    recorder = Recorder({"torchkiln::_norm_backward"})
    with recorder:
        torchkiln.layer_norm(x, 6, weight, bias).sum().backward()
        torchkiln.add_layer_norm(x.detach(), x, 6, weight, bias)[0].sum().backward()
    assert [list(args[-1]) for _, args, _ in recorder.calls] == [flags] * 2


@every_op
def test_what_is_kept_for_backward(device: torch.device, spec: Any) -> None:
    """Saved are x or the sum, the weight, and one or two numbers per row, without copies."""
    sample = spec.leaves(spec.bench(device, torch.bfloat16, (8, 6)))
    x = sample.args[0]
    # Rows with gaps between them are not copied either.
    wide = torch.randn(8, 9, device=device, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    for rows in (x, wide[:, 1:7], x.t().contiguous().t()):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            result = spec.op(rows, *sample.args[1:])
        z = result[1] if isinstance(result, tuple) else rows
        weight = next(sample.args[i] for i in sample.positions if sample.args[i].dim() == 1)
        stats = [t for t in kept if t.dtype == torch.float32]
        others = {t.data_ptr() for t in kept if t.dtype != torch.float32}
        assert others == {z.data_ptr(), weight.data_ptr()}
        assert [t.numel() for t in stats] == [16 if spec in (LAYER_NORM, ADD_LAYER_NORM) else 8]
        assert len(kept) == 3


@every_op
def test_inputs_changed_in_place_are_noticed(device: torch.device, spec: Any) -> None:
    """Writing to a tensor that backward reads raises an error."""
    for position in range(2):
        sample = spec.leaves(spec.bench(device, torch.float32, (8, 6)))
        result = sample.call(spec.op)
        out = result[0] if isinstance(result, tuple) else result
        weight = next(sample.args[i] for i in sample.positions if sample.args[i].dim() == 1)
        changed = weight if position else result[1] if isinstance(result, tuple) else sample.args[0]
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@every_op
@pytest.mark.parametrize("dtype", FLOATING, ids=name)
def test_gradients_do_not_depend_on_threads(dtype: torch.dtype, spec: Any) -> None:
    """Gradients are equal bit by bit: the division of rows depends only on their number."""
    sample = spec.leaves(spec.bench(torch.device("cpu"), dtype, (4099, 37)))
    inputs = sample.take(spec.wanted(sample))
    found = []
    for count in (1, 2, 3, 7):
        with threads(count):
            result = sample.call(spec.op)
            outs = result if isinstance(result, tuple) else (result,)
            found.append(torch.autograd.grad(outs, inputs, [torch.ones_like(o) for o in outs]))
    for other in found[1:]:
        for one, first in zip(other, found[0], strict=True):
            assert torch.equal(bits(one), bits(first))


@every_op
def test_outputs_are_contiguous(device: torch.device, spec: Any) -> None:
    images = torch.randn(2, 3, 5, 7, device=device).to(memory_format=torch.channels_last)
    rows = [images] * (2 if spec.name.startswith("add_") else 1)
    result = spec.op(*rows, 7)
    for out in result if isinstance(result, tuple) else (result,):
        assert out.is_contiguous()
        assert out.shape == images.shape
