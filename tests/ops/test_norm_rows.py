"""Norms of rows that several blocks share, and of tensors whose rows are aligned differently."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.sample import FLOATING

EPS = 1e-5

# Rows too long for a cluster: fewer and more than a team's steps. With more than 128 rows, the rows
# of a step have the same offset from a 16-byte boundary.
LONG = [(9, 300001), (7, 1000003), (40, 270001), (150, 280005), (1, 2000001)]
# Rows whose gradients are computed in slabs, by teams of a few or of many blocks.
SLABS = [(300, 50257), (70, 66000), (40, 262152), (90, 17001)]
# Rows of 1 to 64 KiB in whole vectors: too many for the kernel of few rows. Then rows for its
# strips of each width.
ALIGNED = [(2051, 512), (2060, 4096), (2100, 8192), (2049, 16384)]
ALIGNED += [(300, 136), (1024, 320), (2048, 72), (8192, 16), (16384, 8)]
# Short rows, several per block, and rows that end at each lane of a vector.
SHORT = [(1, 1), (513, 3), (64, 9), (3, 129), (70, 1000), (1000, 17), (33, 2047), (9, 8209)]
SHORT += [(300, 20001), (5, 4096), (8, 200), (256, 33), (257, 33), (4, 16385)]
# The largest number of rows that is read twice, and larger ones, which have partial sums.
SHORT += [(4096, 4), (2048, 12), (2049, 130), (3000, 17), (20000, 6)]

every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=str)
both_norms = pytest.mark.parametrize("centered", [False, True], ids=["rms_norm", "layer_norm"])


class Operands(NamedTuple):
    """The arguments of torchkiln::_norm_backward."""

    grad: Tensor
    grad_sum: Tensor | None
    z: Tensor
    stats: Tensor
    weight: Tensor | None
    offset: float

    def gradients(self, wanted: tuple[bool, ...] | None = None) -> list[Tensor]:
        """The gradients of x, weight and bias (of a layer norm); unwanted ones are empty."""
        wanted = wanted or (True, True, len(self.stats) == 2)
        weight_dtype = self.z.dtype if self.weight is None else self.weight.dtype
        return list(torch.ops.torchkiln._norm_backward.default(*self, weight_dtype, list(wanted)))

    def truth(self) -> list[Tensor]:
        """The gradients in float64."""
        grad, z = self.grad.double(), self.z.double()
        weight = 1.0 if self.weight is None else self.weight.double() + self.offset
        rstd = self.stats[-1].double().unsqueeze(1)
        n = (z - self.stats[0].double().unsqueeze(1) if len(self.stats) == 2 else z) * rstd
        d = grad * weight
        of_x = d - n * (d * n).mean(1, keepdim=True)
        if len(self.stats) == 2:
            of_x = of_x - d.mean(1, keepdim=True)
        of_x = of_x * rstd if grad.shape[1] > 1 or len(self.stats) == 1 else 0 * of_x
        if self.grad_sum is not None:
            of_x = of_x + self.grad_sum.double()
        return [of_x, (grad * n).sum(0), grad.sum(0)]


def rows_of(shape: tuple[int, int], device: torch.device, dtype: torch.dtype, at: int) -> Tensor:
    """Rows at ``at`` elements after an aligned address, with NaN between them if ``at`` is odd."""
    rows, columns = shape
    stride = columns * 2 if at % 2 else columns
    memory = torch.full((rows * stride + at,), math.nan, device=device, dtype=dtype)
    view = memory[at:].view(rows, stride)[:, :columns]
    view.copy_(torch.randn(shape, device=device))
    return view


def operands(
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    centered: bool,
    at: tuple[int, int, int] = (0, 0, 0),
    weight_dtype: torch.dtype | None = None,
    residual: bool = True,
) -> Operands:
    z = rows_of(shape, device, dtype, at[1]).add_(0.5)
    wide = z.double()
    moments = [wide.mean(1)] if centered else []
    size = wide.var(1, correction=0) if centered else wide.square().mean(1)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    stats = torch.stack([*moments, (size + EPS).rsqrt()]).to(compute)
    weight = torch.randn(shape[1], device=device).to(weight_dtype or dtype)
    grad_sum = rows_of(shape, device, dtype, at[2]) if residual else None
    return Operands(rows_of(shape, device, dtype, at[0]), grad_sum, z, stats, weight, 1.0)


def require_close(found: list[Tensor], truth: list[Tensor], dtype: torch.dtype) -> None:
    """Errors are at most 1 rounding step of the largest number, in float32 at most 32."""
    for one, expected in zip(found, truth, strict=True):
        if one.numel() == 0:
            continue
        limit = (1 if one.dtype.itemsize == 2 else 32) * torch.finfo(one.dtype).eps
        error = float((one.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3))
        assert error <= limit, f"{error:.2g} of {dtype}, expected at most {limit:.2g}"


@pytest.mark.cuda
@every_dtype
@both_norms
@pytest.mark.parametrize("shape", [*LONG, *SLABS], ids=str)
def test_gradients_of_long_rows(shape: tuple[int, int], centered: bool, dtype: torch.dtype) -> None:
    """Gradients agree with float64, and repeat bit by bit."""
    args = operands(shape, torch.device("cuda", 0), dtype, centered)
    found = args.gradients()
    require_close(found, args.truth(), dtype)
    for _ in range(3):
        for one, again in zip(found, args.gradients(), strict=True):
            assert torch.equal(one, again)


@pytest.mark.cuda
@every_dtype
@both_norms
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("shape", ALIGNED, ids=str)
def test_gradients_of_aligned_rows(
    shape: tuple[int, int], residual: bool, centered: bool, dtype: torch.dtype
) -> None:
    """Gradients agree with float64, and repeat bit by bit."""
    args = operands(shape, torch.device("cuda", 0), dtype, centered, residual=residual)
    found = args.gradients()
    require_close(found, args.truth(), dtype)
    for one, again in zip(found, args.gradients(), strict=True):
        assert torch.equal(one, again)


@pytest.mark.cuda
@every_dtype
@both_norms
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_long_rows(shape: tuple[int, int], centered: bool, dtype: torch.dtype) -> None:
    """Norms and sums agree with float64 for a mean of 100 deviations, and repeat bit by bit."""
    device = torch.device("cuda", 0)
    x = torch.randn(shape, device=device).add_(100 if dtype.itemsize > 2 else 1).to(dtype)
    residual = torch.randn(shape, device=device).to(dtype)
    weight, bias = torch.randn((2, shape[1]), device=device).to(dtype)
    kept = {"weight": weight, "eps": EPS} | ({"bias": bias} if centered else {})
    op = torchkiln.add_layer_norm if centered else torchkiln.add_rms_norm
    y, total = op(x, residual, shape[1], **kept)
    assert torch.equal(total, x + residual)
    z = total.double()
    from_mean = z - z.mean(1, keepdim=True) if centered else z
    n = from_mean * (from_mean.square().mean(1, keepdim=True) + EPS).rsqrt()
    require_close([y], [n * weight.double() + (bias.double() if centered else 0)], dtype)
    for _ in range(3):
        assert torch.equal(op(x, residual, shape[1], **kept)[0], y)


@every_dtype
@both_norms
@pytest.mark.parametrize("shape", [*SHORT, *(s for s in LONG[:1])], ids=str)
def test_offsets_that_differ(
    device: torch.device, shape: tuple[int, int], centered: bool, dtype: torch.dtype
) -> None:
    """Gradients agree with float64 for any alignment of each tensor, and repeat bit by bit."""
    if device.type == "cpu" and shape[1] > 10_000:
        pytest.skip("one path for all lengths")
    for at in ((0, 0, 0), (0, 1, 2), (3, 0, 0), (5, 5, 4), (2, 7, 2)):
        args = operands(shape, device, dtype, centered, at)
        truth = args.truth()
        found = args.gradients()
        for one, again in zip(found, args.gradients(), strict=True):
            assert torch.equal(one, again)
        if centered and shape[1] == 1:  # x equals its mean up to rounding
            truth = [*truth[:1], torch.zeros_like(truth[1]), truth[2]]
            found = [*found[:1], torch.zeros_like(found[1]), found[2]]
        require_close(found, truth, dtype)


@pytest.mark.parametrize("columns", [9, 5000, pytest.param(300001, marks=pytest.mark.cuda)])
@both_norms
def test_wanted_gradients(device: torch.device, columns: int, centered: bool) -> None:
    """A gradient has the same bits whichever others are wanted; the weight may be float32."""
    dtype = torch.bfloat16
    args = operands((19, columns), device, dtype, centered, (1, 2, 0), torch.float32)
    for weight, grad_sum in ((args.weight, None), (None, args.grad_sum)):
        some = args._replace(weight=weight, grad_sum=grad_sum)
        whole = some.gradients()
        for wanted in itertools.product((False, True), repeat=3):
            if not any(wanted) or (wanted[2] and not centered):
                continue
            found = some.gradients(wanted)
            for one, expected, computed in zip(found, whole, wanted, strict=True):
                assert torch.equal(one, expected) if computed else one.numel() == 0


@pytest.mark.cuda
def test_long_rows_in_a_cuda_graph() -> None:
    """Kernels whose blocks wait for each other run in a CUDA graph, while another stream runs."""
    device = torch.device("cuda", 0)
    args = operands((40, 300001), device, torch.bfloat16, True)
    x, weight = args.z.contiguous(), args.weight
    expected = [torchkiln.layer_norm(x, x.shape[1], weight, None, EPS), *args.gradients()]
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [torchkiln.layer_norm(x, x.shape[1], weight, None, EPS), *args.gradients()]
    stream = torch.cuda.Stream(device)
    for _ in range(10):
        graph.replay()
        with torch.cuda.stream(stream):
            beside = args.gradients()
    torch.cuda.synchronize(device)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(beside, expected[1:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_in_place(dtype: torch.dtype) -> None:
    """Sum and norm may overwrite their arguments, whose rows are aligned differently."""
    device = torch.device("cuda", 0)
    shape = (40, 300001)
    memory = torch.randn((2, 40 * 300001 + 8), device=device).to(dtype)
    x, residual = memory[0, 3:-5].view(shape), memory[1, 2:-6].view(shape)
    weight = torch.randn(shape[1], device=device).to(dtype)
    y, total = torchkiln.add_rms_norm(x.clone(), residual.clone(), shape[1], weight)
    torchkiln.add_rms_norm_(x, residual, shape[1], weight)
    assert torch.equal(residual, total)
    require_close([x], [y.double()], dtype)


@pytest.mark.cuda
@both_norms
def test_one_row_that_is_not_finite(centered: bool) -> None:
    """NaN and infinity reach all blocks of their row, and no other row."""
    device = torch.device("cuda", 0)
    args = operands((9, 300001), device, torch.float32, centered)
    x, weight = args.z.contiguous(), args.weight
    norm = torchkiln.layer_norm if centered else torchkiln.rms_norm
    y, of_x = norm(x, x.shape[1], weight, eps=EPS), args.gradients()[0]
    for value in (math.nan, math.inf):
        x[4, 100_000] = value
        args.z[4, 100_000] = value
        found = norm(x, x.shape[1], weight, eps=EPS), args.gradients()[0]
        rest = [r for r in range(9) if r != 4]
        for one, before in zip(found, (y, of_x), strict=True):
            assert torch.equal(one[rest], before[rest])
        assert found[0][4, 100_000].isnan()
        assert not found[1][4].isfinite().any()
