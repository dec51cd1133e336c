"""Norms and gradients of long rows that are cut into slabs of columns."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

import torchkiln

HALF_AND_FLOAT = (torch.float16, torch.bfloat16, torch.float32)
EPS = 1e-5

# Shape, and the offset of x. If vectors are read, all rows of a team have the same offset from a
# 16-byte boundary (OFFSETS), or the team takes runs of rows with equal offsets (RUNS). The last
# slab may have warps without an element, or be empty (EMPTY). Single elements are read if runs
# would be short, or if x and y have different offsets (ELEMENTS).
ALIGNED = [(300, 131200, 0), (70, 262152, 0)]
OFFSETS = [(170, 50257, 0)]
RUNS = [(700, 50257, 0), (140, 262143, 0), (900, 37002, 0)]
EMPTY = [(16, 361160, 0), (16, 540729, 0), (128, 540727, 0)]
ELEMENTS = [(40, 300001, 0), (2200, 4099, 3), (300, 50264, 5)]

pytestmark = pytest.mark.cuda
every_dtype = pytest.mark.parametrize("dtype", HALF_AND_FLOAT, ids=str)
both_norms = pytest.mark.parametrize("centered", [False, True], ids=["rms_norm", "layer_norm"])


def begins_at(shape: tuple[int, int], at: int, dtype: torch.dtype, mean: float) -> Tensor:
    """Rows at ``at`` elements after a 16-byte boundary, with NaN before and after them."""
    count = math.prod(shape)
    memory = torch.full((at + count + 16,), math.nan, device="cuda", dtype=dtype)
    view = memory[at : at + count].view(shape)
    return view.copy_(torch.randn(shape, device="cuda").add_(mean))


def parameters(columns: int, dtype: torch.dtype, centered: bool) -> dict[str, Tensor]:
    weight, bias = torch.randn((2, columns), device="cuda").to(dtype)
    return {"weight": weight, "bias": bias} if centered else {"weight": weight}


def norm(x: Tensor, kept: dict[str, Tensor]) -> Tensor:
    if "bias" in kept:
        return torchkiln.layer_norm(x, x.shape[1], kept["weight"], kept["bias"], EPS)
    return torchkiln.rms_norm(x, x.shape[1], kept["weight"], EPS)


def truth(z: Tensor, kept: dict[str, Tensor]) -> Tensor:
    """The norm in float64 with these parameters."""
    z = z.double()
    from_mean = z - z.mean(1, keepdim=True) if "bias" in kept else z
    n = from_mean * (from_mean.square().mean(1, keepdim=True) + EPS).rsqrt()
    return n * kept["weight"].double() + (kept["bias"].double() if "bias" in kept else 0)


def require_close(found: Tensor, expected: Tensor, steps: float = 1) -> None:
    """An error is at most one rounding of the element; in float32 32 eps of |y| + 1."""
    if found.dtype.itemsize == 2:
        unit, least = torch.finfo(found.dtype).eps, 0.1
    else:
        unit, least = 32 * torch.finfo(found.dtype).eps, 1
    excess = (found.double() - expected).abs() / (steps * unit * (expected.abs() + least))
    assert float(excess.max()) <= 1, f"{float(excess.max()):.3g} times what is allowed"


def require_near(found: Tensor, expected: Tensor) -> None:
    """Errors are at most 1 rounding step of the largest gradient, in float32 at most 32."""
    limit = (1 if found.dtype.itemsize == 2 else 32) * torch.finfo(found.dtype).eps
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    assert error <= limit, f"{error:.2g}, expected at most {limit:.2g}"


def require_planned_gpu() -> None:
    """Skips if the GPU runs another number of blocks at once than plans are checked for."""
    found = torch.cuda.get_device_properties("cuda")
    if found.major < 9 or found.multi_processor_count != 132:
        pytest.skip("the plans are those of 132 multiprocessors of compute capability 9.0 or later")


def lanes_of(x: Tensor) -> int:
    """The number of elements that the kernel of slabs reads at once; 0 if another kernel runs."""
    report = str(torchkiln.explain(torchkiln.layer_norm, x, x.shape[1]))
    found = re.search(r"norm_slab_rows<\w+, (\d+)", report)
    return int(found[1]) if found else 0


@every_dtype
@both_norms
@pytest.mark.parametrize("where", [*ALIGNED, *OFFSETS, *RUNS, *EMPTY, *ELEMENTS], ids=str)
def test_norms(where: tuple[int, int, int], centered: bool, dtype: torch.dtype) -> None:
    """Results agree with float64 for a large mean, and repeat bit by bit."""
    shape, at = where[:2], where[2]
    x = begins_at(shape, at, dtype, 100 if dtype == torch.float32 else 3)
    kept = parameters(shape[1], dtype, centered)
    y = norm(x, kept)
    require_close(y, truth(x, kept))
    for _ in range(3):
        assert torch.equal(norm(x, kept), y)


@every_dtype
@both_norms
@pytest.mark.parametrize("where", [ALIGNED[1], RUNS[0], RUNS[2], ELEMENTS[-1]], ids=str)
def test_norms_of_sums(where: tuple[int, int, int], centered: bool, dtype: torch.dtype) -> None:
    """The norm is that of the rounded sum; sum and norm may overwrite the arguments."""
    shape, at = where[:2], where[2]
    x, residual = (begins_at(shape, some, dtype, 1) for some in (at, at // 2))
    kept = parameters(shape[1], dtype, centered)
    if centered:
        y, total = torchkiln.add_layer_norm(
            x, residual, shape[1], kept["weight"], kept["bias"], EPS
        )
    else:
        y, total = torchkiln.add_rms_norm(x, residual, shape[1], kept["weight"], EPS)
    assert torch.equal(total, x + residual)
    require_close(y, truth(total, kept))
    if centered:
        return
    torchkiln.add_rms_norm_(x, residual, shape[1], kept["weight"], EPS)
    assert torch.equal(residual, total)
    require_close(x, truth(total, kept))


@pytest.mark.parametrize(
    ("where", "dtype", "lanes"),
    [(where, torch.bfloat16, 8) for where in (ALIGNED[1], *OFFSETS, *RUNS, EMPTY[0], EMPTY[2])]
    + [(RUNS[0], torch.float16, 8), (RUNS[0], torch.float32, 4), (OFFSETS[0], torch.float32, 4)]
    + [(where, torch.bfloat16, 1) for where in (EMPTY[1], *ELEMENTS)],
    ids=str,
)
def test_access(where: tuple[int, int, int], dtype: torch.dtype, lanes: int) -> None:
    """Each shape above runs the kernel of slabs with vectors or elements, as listed."""
    require_planned_gpu()
    x = begins_at(where[:2], where[2], dtype, 0)
    assert lanes_of(x) == lanes


@every_dtype
@pytest.mark.parametrize(("stride", "in_vectors"), [(50265, True), (50264, False)])
def test_a_row_stride(stride: int, in_vectors: bool, dtype: torch.dtype) -> None:
    """Rows with NaN between them agree with float64; equal offsets of x and y allow vectors."""
    x = begins_at((700, stride), 0, dtype, 1)[:, :50257]
    x.as_strided((699, stride - 50257), (stride, 1), 50257).fill_(math.nan)
    kept = parameters(50257, dtype, True)
    require_close(norm(x, kept), truth(x, kept))
    require_planned_gpu()
    assert lanes_of(x) == (16 // dtype.itemsize if in_vectors else 1)


def test_few_rows_use_clusters() -> None:
    x = torch.randn(8, 262152, device="cuda", dtype=torch.bfloat16)
    assert lanes_of(x) == 0


@every_dtype
@pytest.mark.parametrize("rounds", [False, True], ids=["", "round_input"])
def test_options(dtype: torch.dtype, rounds: bool) -> None:
    """A float32 weight with an offset, and round="input", agree with float64."""
    x = begins_at((700, 50257), 0, dtype, 0.5)
    weight = torch.randn(50257, device="cuda") * 0.1
    y = torchkiln.layer_norm(
        x, 50257, weight, None, EPS, offset=1.0, round="input" if rounds else "once"
    )
    wide = x.double()
    n = torch.nn.functional.layer_norm(wide, (50257,), eps=EPS)
    n = n.to(dtype).double() if rounds else n
    require_close(y, n * (1 + weight.double()), steps=2 if rounds else 1)


@every_dtype
@pytest.mark.parametrize("where", [ALIGNED[1], RUNS[0]], ids=str)
def test_one_large_element(where: tuple[int, int, int], dtype: torch.dtype) -> None:
    """An element of 3000 at the start of a row does not change the error of the others."""
    x = begins_at(where[:2], 0, dtype, 0)
    x[:, 0] = 3000
    x[::2, where[1] // 2] = -2000
    kept = parameters(where[1], dtype, True)
    y, expected = norm(x, kept), truth(x, kept)
    rest = [1, where[1] // 2 - 1]
    require_close(y[:, rest[0] : rest[1]], expected[:, rest[0] : rest[1]])


@both_norms
@pytest.mark.parametrize("where", [ALIGNED[1], RUNS[0], ELEMENTS[0]], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite(
    where: tuple[int, int, int], centered: bool, value: float
) -> None:
    """Only rows with such an element change, though others share 16 bytes with it."""
    shape = where[:2]
    x = begins_at(shape, 0, torch.bfloat16, 0)
    kept = parameters(shape[1], torch.bfloat16, centered)
    before = norm(x, kept)
    x[5, 0] = x[9, -1] = value
    found = norm(x, kept)
    rest = [row for row in range(shape[0]) if row not in (5, 9)]
    assert torch.equal(found[rest], before[rest])
    assert found[5, 0].isnan()
    assert found[9, -1].isnan()


@every_dtype
@both_norms
@pytest.mark.parametrize("where", [*RUNS, (2300, 6657, 0), ELEMENTS[1]], ids=str)
def test_gradients(where: tuple[int, int, int], centered: bool, dtype: torch.dtype) -> None:
    """Gradients agree with float64 and repeat bit by bit; NaN in memory beside x does not enter."""
    shape, at = where[:2], where[2]
    x = begins_at(shape, at, dtype, 0.5).requires_grad_(True)
    kept = {k: v.requires_grad_(True) for k, v in parameters(shape[1], dtype, centered).items()}
    grad = begins_at(shape, 0, dtype, 0.2)
    leaves = [x, *kept.values()]
    found = torch.autograd.grad(norm(x, kept), leaves, grad)
    wide = [one.detach().double().requires_grad_(True) for one in leaves]
    again = dict(zip(kept, wide[1:], strict=True))
    expected = torch.autograd.grad(truth(wide[0], again), wide, grad.double())
    for one, other in zip(found, expected, strict=True):
        require_near(one, other)
    for _ in range(3):
        repeated = torch.autograd.grad(norm(x, kept), leaves, grad)
        assert all(torch.equal(one, two) for one, two in zip(found, repeated, strict=True))


def test_in_a_graph_beside_another_stream() -> None:
    """Kernels whose blocks wait for each other run in a CUDA graph, while another stream runs."""
    x = begins_at((700, 50257), 0, torch.bfloat16, 0)
    kept = parameters(50257, torch.bfloat16, True)
    expected = norm(x, kept)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = norm(x, kept)
    stream = torch.cuda.Stream()
    for _ in range(10):
        graph.replay()
        with torch.cuda.stream(stream):
            beside = norm(x, kept)
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    assert torch.equal(beside, expected)
