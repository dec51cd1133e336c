"""sum and mean beyond the contract: exact counts, accuracy, dimensions, layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dtypes import FLOATING, every_dtype, name
from torch import Tensor

import torchkiln
from torchkiln.testing.compare import bits
from torchkiln.testing.contract.repeat import threads
from torchkiln.testing.contract.values import available_memory

OPS = ((torchkiln.sum, torch.sum), (torchkiln.mean, torch.mean))

every_op = pytest.mark.parametrize(("op", "torchs"), OPS, ids=["sum", "mean"])


def need(bytes_needed: int, device: torch.device) -> None:
    if available_memory(device) < bytes_needed:
        pytest.skip(f"needs {bytes_needed >> 30} GiB of free memory on {device}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("columns", [2601, 5120])
@pytest.mark.parametrize("layout", ["adjacent", "slice", "strided"])
def test_many_rows_of_several_kilobytes(
    device: torch.device, dtype: torch.dtype, columns: int, layout: str
) -> None:
    """Rows that a GPU adds with 64, 128 and 256 threads per block agree with float64."""
    whole = torch.randn(4300, columns + 3, device=device).to(dtype)
    x = {"adjacent": whole[:, 3:].contiguous(), "slice": whole[:, 3:], "strided": whole[:, ::2]}[
        layout
    ]
    for ours, torchs in OPS:
        truth = torchs(x.double(), -1)
        near = torch.finfo(dtype).eps * truth.abs() + 1e-6 * torchs(x.double().abs(), -1)
        assert ((ours(x, -1).double() - truth).abs() <= near).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("shape", [(2**26 + 5,), (2**13, 2**13 + 1), (2**25 + 1, 2)], ids=str)
def test_ones_are_counted(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Ones are counted exactly beyond 2**24, where adding 1 to a float32 has no effect."""
    x = torch.ones(shape, dtype=dtype, device=device)
    assert torchkiln.sum(x, dtype=torch.float64).item() == x.numel()
    assert torchkiln.sum(x).double().item() == torch.tensor(float(x.numel())).to(dtype).item()
    for d, size in enumerate(shape):
        expected = torch.tensor(float(size)).to(dtype).item()
        assert (torchkiln.sum(x, d) == expected).all()
    assert torchkiln.mean(x).item() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2**31,), (2**16, 2**15)], ids=str)
def test_expanded_ones_are_counted(device: torch.device, shape: tuple[int, ...]) -> None:
    """2**31 expanded ones, which take no memory, are counted exactly."""
    x = torch.ones((), device=device).expand(shape)
    assert torchkiln.sum(x).item() == 2.0**31


@pytest.mark.large
@pytest.mark.rotates("dtype", 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_more_than_2_to_the_31_elements(device: torch.device, dtype: torch.dtype) -> None:
    """Full, row and column sums count each element on both sides of 2**31 once."""
    rows, columns = 2**16 + 1, 2**15 + 1
    need(rows * columns * dtype.itemsize + 2**30, device)
    x = torch.ones((rows, columns), dtype=dtype, device=device)
    total = rows * columns
    assert torchkiln.sum(x, dtype=torch.float64).item() == total
    assert torchkiln.sum(x).item() == torch.tensor(total, dtype=torch.float64).to(dtype).item()
    for place in (2**31 - 1, 2**31, 2**31 + 5, total - 1):
        i, j = divmod(place, columns)
        x[i, j] = 5.0
    for dim, size in ((1, rows), (0, columns)):
        expected = torch.full((size,), float(x.shape[dim]), dtype=torch.float64, device=device)
        for place in (2**31 - 1, 2**31, 2**31 + 5, total - 1):
            expected[divmod(place, columns)[dim == 0]] += 4.0
        assert torch.equal(torchkiln.sum(x, dim, dtype=torch.float64), expected)
        assert torch.equal(torchkiln.sum(x, dim), expected.to(dtype))
    many = torch.ones((3, 1), dtype=dtype, device=device).expand(3, 2**31 + 2)
    assert (torchkiln.sum(many, 1, dtype=torch.float64) == 2.0**31 + 2).all()


@every_dtype
@pytest.mark.parametrize("dim", [None, 0, 1], ids=str)
def test_accuracy_where_terms_cancel(
    device: torch.device, dtype: torch.dtype, dim: int | None
) -> None:
    """The error is below that of pairwise sums: eps/2 * log2(n) of the sum of magnitudes."""
    x = torch.randn(3000, 1100, device=device, dtype=torch.float64)
    x[1500:] = -x[:1500]
    x += 1e-3 * torch.randn(3000, 1100, device=device, dtype=torch.float64)
    x = x.to(dtype)
    exact = x.cpu().double().numpy().astype(np.longdouble).sum(axis=dim)
    found = torchkiln.sum(x, dim, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    sizes = x.cpu().double().abs().sum(dim).numpy()
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    count = x.numel() if dim is None else x.shape[dim]
    error = np.abs(found.cpu().double().numpy() - exact)
    assert (error <= eps / 2 * math.log2(count) * sizes).all()


@every_dtype
def test_rounded_once(device: torch.device, dtype: torch.dtype) -> None:
    """Sums of small integers and halves are exact in float32, so they are rounded once."""
    x = torch.randint(-64, 65, (70, 1030), device=device).double() / 2
    for dim in (None, 0, 1):
        for op, torchs in OPS:
            exact = torchs(x, dim)
            found = op(x.to(dtype), dim)
            due = exact.float().to(dtype) if dtype != torch.float64 else exact
            # The quotient of a mean may be off by an ulp of float32, which can move it past a
            # midpoint of half precision.
            eps = 0 if op is torchkiln.sum else torch.finfo(dtype).eps
            assert ((found.double() - due.double()).abs() <= eps * due.double().abs()).all()


def layouts(x: Tensor) -> Iterator[Tensor]:
    """The same 4-D tensor in different layouts of memory."""
    yield x
    for order in itertools.permutations(range(4)):
        back = [order.index(d) for d in range(4)]
        yield x.permute(order).contiguous().permute(back)
    wide = x.new_full([n + 3 for n in x.shape], math.nan)
    inside = wide[tuple(slice(1, n + 1) for n in x.shape)]
    yield inside.copy_(x)
    sparse = x.new_full([2 * n for n in x.shape], math.nan)[..., ::2, ::2, ::2, ::2]
    yield sparse.copy_(x)
    yield x[:1].expand(x.shape)
    yield x[:, :, :, :1].expand(x.shape)


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_every_choice_of_dimensions_in_every_layout(
    device: torch.device, dtype: torch.dtype, op: Any, torchs: Any
) -> None:
    for shape in ((3, 4, 5, 6), (2, 1, 33, 8), (17, 3, 2, 65)):
        for x in layouts(torch.randn(shape, device=device).to(dtype)):
            for count in range(5):
                for dim in itertools.combinations(range(4), count):
                    keepdim = count % 2 == 1
                    found = op(x, dim, keepdim)
                    expected = torchs(x.double(), dim, keepdim)
                    assert found.shape == expected.shape
                    assert found.is_contiguous()
                    torch.testing.assert_close(
                        found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4
                    )


@every_op
def test_shapes_and_dtypes_are_torchs(device: torch.device, op: Any, torchs: Any) -> None:
    for shape in ((), (1,), (4,), (2, 3), (1, 3, 1), (0,), (0, 3), (3, 0, 2)):
        x = torch.randn(shape, device=device)
        rank = len(shape)
        dims: list[Any] = [None, (), [], *range(-max(rank, 1), max(rank, 1))]
        dims += itertools.combinations(range(rank), 2)
        for dim, keepdim, dtype in itertools.product(dims, (False, True), (None, *FLOATING)):
            found = op(x, dim, keepdim, dtype=dtype)
            expected = torchs(x, dim, keepdim, dtype=dtype)
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-2, atol=1e-2)
            assert found.data_ptr() != x.data_ptr() or x.numel() == 0


@every_op
def test_wrong_types(op: Any, torchs: Any) -> None:
    prefix = rf"^torchkiln\.{torchs.__name__}: "
    x = torch.ones(2, 3)
    ints = r"expected an int, a tuple of ints or None$"
    for dim, kind in ((1.0, "float"), ("0", "str"), (True, "bool"), ((0, 1.0), "float")):
        with pytest.raises(TypeError, match=prefix + f"dim: got {kind}, {ints}"):
            op(x, dim)
    with pytest.raises(TypeError, match=prefix + f"dim: got Tensor, {ints}"):
        op(x, torch.tensor(0))
    with pytest.raises(TypeError, match=prefix + "keepdim: got int, expected a bool$"):
        op(x, 0, 1)
    with pytest.raises(TypeError, match=prefix + r"dtype: got type, expected a torch\.dtype or"):
        op(x, dtype=float)
    with pytest.raises(TypeError, match=prefix + r"x: got list, expected a torch\.Tensor$"):
        op([1.0, 2.0])
    with pytest.raises(IndexError, match=prefix + "dim: got 9223372036854775807, expected"):
        op(x, 2**70)
    assert torch.equal(op(x, np.int64(1)), op(x, 1))
    assert torch.equal(op(x, torch.Size([0, 1])), op(x))


@every_op
def test_autocast_does_what_torch_does(device: torch.device, op: Any, torchs: Any) -> None:
    """Under autocast sums of half precision have torch's dtypes: on CUDA float32 by default."""
    for low, dtype, out in itertools.product(FLOATING[2:], FLOATING, (None, torch.float16)):
        x = torch.full((4, 3), 0.5, device=device, dtype=dtype, requires_grad=True)
        with torch.autocast(device.type, low):
            found, expected = op(x, 0, dtype=out), torchs(x, 0, dtype=out)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        found.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype


@every_dtype
def test_values_that_are_not_finite(device: torch.device, dtype: torch.dtype) -> None:
    """Infinities and NaN give torch's results, also +inf and -inf in one row, near or far apart."""
    for shape, dim in (((5, 300), 1), ((300, 5), 0), ((3, 70000), 1)):
        x = torch.ones(shape, device=device, dtype=dtype)
        row, middle = x.select(1 - dim, 1), shape[dim] // 2
        for first, second in ((0, -1), (middle, middle - 1)):
            for values in ((math.inf, -math.inf), (math.inf, 1), (-math.inf, 1), (math.nan, 1)):
                row[first], row[second] = values
                for op, torchs in OPS:
                    found, expected = (f(x, dim, dtype=torch.float64) for f in (op, torchs))
                    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
            row.fill_(1)


@every_dtype
def test_the_number_of_threads_does_not_matter(dtype: torch.dtype) -> None:
    for shape in ((300001,), (40000, 11), (11, 40000), (500, 700)):
        x = torch.randn(shape).to(dtype)
        for dim in (None, 0, len(shape) - 1):
            results = []
            for count in (1, 2, 3):
                with threads(count):
                    results.append(bits(torchkiln.sum(x, dim)))
            assert torch.equal(results[0], results[1])
            assert torch.equal(results[0], results[2])


@every_op
def test_gradient_is_a_view_of_the_incoming_one(device: torch.device, op: Any, torchs: Any) -> None:
    """The gradient is an expanded view without memory of its own; values equal torch's."""
    x = torch.randn(7, 5, 3, device=device, requires_grad=True)
    grad = torch.randn(5, device=device)
    (found,) = torch.autograd.grad(op(x, (0, -1)), x, grad)
    (expected,) = torch.autograd.grad(torchs(x, (0, -1)), x, grad)
    torch.testing.assert_close(found, expected)
    assert found.untyped_storage().nbytes() == grad.untyped_storage().nbytes()
    assert found.stride()[0] == found.stride()[2] == 0


def test_gradient_of_another_dtype(device: torch.device) -> None:
    x = torch.randn(3, 4, device=device, dtype=torch.bfloat16, requires_grad=True)
    torchkiln.mean(x, 1, dtype=torch.float64).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert (x.grad == 0.25).all()


@pytest.mark.parametrize("call", [torchkiln.sum, torch.ops.torchkiln.sum.default])
def test_keywords(call: Callable[..., Tensor]) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert call(x=x, dim=1, keepdim=True, dtype=torch.float64).tolist() == [[3.0], [12.0]]


INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", INTEGERS, ids=name)
def test_integers_are_summed_as_in_torch(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randint(-100, 100, (3, 5, 7), device=device).to(dtype)
    calls: list[dict[str, Any]] = [
        {},
        {"dim": 1},
        {"dim": (0, -1), "keepdim": True},
        {"dim": 2, "dtype": torch.int32},
        {"dtype": torch.float16},
        {"dim": (), "dtype": torch.bool},
    ]
    for arguments in calls:
        for given in (x, x.transpose(0, 2), x[:0], x[0, 0, 0]):
            if given.dim() == 0 and arguments.get("dim"):
                continue
            found, expected = (f(given, **arguments) for f in (torchkiln.sum, torch.sum))
            assert found.dtype == expected.dtype
            assert found.is_contiguous()
            assert torch.equal(found, expected)
    assert torch.equal(torchkiln.mean(x, 1, dtype=torch.float64), x.double().mean(1))
    meta = torchkiln.sum(x.to("meta"), 1)
    assert (meta.dtype, meta.shape) == (torch.int64, (3, 7))
    assert torch.equal(torch.vmap(torchkiln.sum)(x), x.sum((1, 2)))


def test_floats_are_summed_in_integers_as_in_torch(device: torch.device) -> None:
    x = torch.tensor([1.5, 1.5, -0.5], device=device)
    assert torchkiln.sum(x, dtype=torch.int64).item() == torch.sum(x, dtype=torch.int64).item() == 2
    assert not torchkiln.sum(x.requires_grad_(), dtype=torch.int64).requires_grad


def test_the_mean_of_integers_needs_a_dtype(device: torch.device) -> None:
    for x in (torch.arange(3, device=device), torch.ones(3, dtype=torch.bool, device=device)):
        words = rf"mean: x: got dtype {name(x.dtype)}, expected one of .*; pass dtype=torch.float32"
        with pytest.raises(RuntimeError, match=words):
            torchkiln.mean(x)
    with pytest.raises(RuntimeError, match=r"mean: dtype: got int64, expected one of float32"):
        torchkiln.mean(torch.arange(3, device=device), dtype=torch.int64)


LARGE = {
    "alternating": lambda n: torch.tensor([1.0, -1.0]).repeat(n // 2),
    "halves": lambda n: torch.tensor([1.0, -1.0]).repeat_interleave(n // 2),
    "pairs": lambda n: torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(n // 4),
    "random": lambda n: torch.tensor([1.0, -1.0]).repeat(n // 2)[torch.randperm(n)],
}


@pytest.mark.parametrize("order", LARGE)
@pytest.mark.parametrize("count", [4, 8, 64, 1000, 140000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name)
def test_sums_near_the_largest_number(dtype: torch.dtype, count: int, order: str) -> None:
    """On a CPU, sums are correct though partial sums exceed the largest number, in any order."""
    largest = torch.finfo(dtype).max
    terms = (LARGE[order](count).double() * largest * 0.75).to(dtype)
    first = terms[0].item()  # the others add up to -first
    terms[0] = first * 1.25
    expected = terms[0].item() - first

    def require(found: Tensor, due: float) -> None:
        rtol = max(torch.finfo(dtype).eps, 1e-6)
        exact = torch.full(found.shape, due, dtype=torch.float64)
        torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=0)

    require(torchkiln.sum(terms), expected)
    require(torchkiln.sum(terms[:, None].repeat(1, 3), 0), expected)
    require(torchkiln.sum(terms.repeat(2, 1), 1), expected)
    require(torchkiln.sum(terms.reshape(2, 1, -1).repeat(1, 2, 1), (0, 2)), expected)
    same = torch.full((count, 2), largest / 2, dtype=dtype)
    require(torchkiln.mean(same), same[0, 0].item())
    require(torchkiln.mean(same, 0), same[0, 0].item())
    assert torchkiln.sum(same).item() == math.inf


def test_infinite_terms_stay_infinite() -> None:
    """The second pass for sums near the largest number does not change infinite or NaN results."""
    x = torch.full((5, 4), 1e308, dtype=torch.float64)
    x[1, 2] = math.inf
    x[2, 0], x[2, 1] = math.inf, -math.inf
    x[3, 3] = math.nan
    x[4] = torch.tensor([1e308, 1e308, -1e308, 5e-324], dtype=torch.float64)
    found = torchkiln.sum(x, 1).tolist()
    assert found[:2] == [math.inf, math.inf]
    assert math.isnan(found[2])
    assert math.isnan(found[3])
    assert found[4] == 1e308
    assert torchkiln.mean(x[0]).item() == 1e308
