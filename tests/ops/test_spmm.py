"""Sparse products beyond the contract."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln.ops.spmm import spmm_csr
from torchkiln.testing.specs.spmm import dense, pattern

# Torch warns when a sparse tensor is created.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

INDICES = (torch.int32, torch.int64)


def matrix(
    rows: int, columns: int, device: torch.device, index: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor, Tensor]:
    """crow, col and values of a matrix of which a third is stored."""
    crow, col = pattern(rows, columns, device, index)
    return crow, col, torch.randn(col.shape, device=device)


def close(found: Tensor, expected: Tensor) -> None:
    """Equal up to 1e-5."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("index", INDICES)
def test_a_torch_tensor(device: torch.device, index: torch.dtype) -> None:
    crow, col, values = matrix(13, 9, device, index)
    a = torch.sparse_csr_tensor(crow, col, values, (13, 9)).requires_grad_()
    b = torch.randn(9, 6, device=device, requires_grad=True)
    y = torchkiln.spmm(a, b)
    close(y, a.to_dense() @ b)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (a, b), grad)
    expected = torch.autograd.grad(a.to_dense() @ b, (a, b), grad)
    assert found[0].layout == torch.sparse_csr
    row = torch.arange(13, device=device).repeat_interleave(crow.diff())
    close(found[0].values(), expected[0].to_dense()[row, col.long()])
    close(found[1], expected[1])


def test_what_is_stored_spreads_nan(device: torch.device) -> None:
    """Only stored elements spread NaN and infinities, as in torch.sparse."""
    crow = torch.tensor([0, 2, 2, 3], device=device)
    col = torch.tensor([0, 2, 1], device=device)
    values = torch.tensor([1.0, torch.nan, torch.inf], device=device)
    y = spmm_csr(values, torch.tensor([[2.0], [-1.0], [4.0]], device=device), crow, col)
    assert torch.equal(y.isnan().flatten().cpu(), torch.tensor([True, False, False]))
    assert y[1:].flatten().tolist() == [0.0, -torch.inf]
    b = torch.tensor([[torch.inf], [torch.nan], [0.0]], device=device)
    y = spmm_csr(torch.ones(3, device=device), b, crow, col)
    assert y[0].item() == torch.inf
    assert y[1].item() == 0
    assert y[2].isnan()


def test_a_tuple(device: torch.device) -> None:
    crow, col, values = matrix(13, 9, device)
    b = torch.randn(9, 6, device=device)
    expected = dense(values, crow, col, 9) @ b
    close(torchkiln.spmm((crow, col, values), b), expected)
    close(torchkiln.spmm((crow, col, values, (13, 9)), b), expected)
    with pytest.raises(RuntimeError, match=r"spmm: b: got size 9 in dimension 0"):
        torchkiln.spmm((crow, col, values, (13, 8)), b)


def test_a_batch_of_torch(device: torch.device) -> None:
    """Batches of sparse matrices, which torch.bmm refuses, agree with the dense product."""
    crow, col, _ = matrix(6, 5, device)
    values = torch.randn(3, col.numel(), device=device)
    each = crow.expand(3, -1).contiguous(), col.expand(3, -1).contiguous()
    a = torch.sparse_csr_tensor(*each, values, (3, 6, 5))
    b = torch.randn(3, 5, 4, device=device)
    close(torchkiln.spmm(a, b, check=True), a.to_dense() @ b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csc])
def test_coo_and_csc_are_converted(
    device: torch.device, layout: torch.layout, dtype: torch.dtype
) -> None:
    """COO and CSC give CSR's result bit by bit; the gradient has the layout of the matrix."""
    crow, col, values = matrix(13, 9, device)
    csr = torch.sparse_csr_tensor(crow, col, values.to(dtype), (13, 9))
    full = csr.to_dense()
    a = full.to_sparse(layout=layout).requires_grad_()
    b = torch.randn(9, 6, device=device).to(dtype).requires_grad_()
    y = torchkiln.spmm(a, b, check=True)
    assert torch.equal(y, torchkiln.spmm(full.to_sparse_csr(), b))
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (a, b), grad)
    assert found[0].layout == layout
    expected = (grad.double() @ b.double().t()) * (full != 0)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        found[0].to_dense().double(), expected, rtol=tolerance, atol=20 * tolerance
    )
    assert torch.equal(found[1], torch.autograd.grad(torchkiln.spmm(csr, b), b, grad)[0])


def test_coo_with_equal_indices(device: torch.device) -> None:
    """Values at equal indices are added; each has the gradient of the sum."""
    places = torch.tensor([[1, 0, 1], [2, 1, 2]], device=device)
    values = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
    b = torch.randn(4, 5, device=device)
    y = torchkiln.spmm(torch.sparse_coo_tensor(places, values, (3, 4)), b)
    close(y, torch.stack([2 * b[1], 4 * b[2], 0 * b[0]]))
    (found,) = torch.autograd.grad(y.sum(), values)
    close(found, b.sum(1)[places[1]])


def test_a_vector(device: torch.device) -> None:
    crow, col, values = matrix(13, 9, device)
    values.requires_grad_()
    b = torch.randn(9, device=device, requires_grad=True)
    y = torchkiln.spmm((crow, col, values, (13, 9)), b)
    assert y.shape == (13,)
    expected = dense(values, crow, col, 9) @ b
    close(y, expected)
    grad = torch.randn_like(y)
    pairs = zip(*(torch.autograd.grad(t, (values, b), grad) for t in (y, expected)), strict=True)
    for found, due in pairs:
        close(found, due)
    every = values.detach().expand(3, -1)
    assert torch.equal(torchkiln.spmm((crow, col, every), b), y.expand(3, -1))
    with pytest.raises(RuntimeError, match=r"spmm: b: got size 8 in dimension 0"):
        torchkiln.spmm((crow, col, values, (13, 9)), b[:8])


def test_other_layouts_say_what_to_call() -> None:
    full = torch.eye(4)
    message = (
        r"spmm: a: got layout torch.{}, expected torch.sparse_csr, torch.sparse_csc or "
        r"torch.sparse_coo; call \.to_sparse_csr\(\) first"
    )
    for a, layout in ((full, "strided"), (full.to_sparse_bsr((2, 2)), "sparse_bsr")):
        with pytest.raises(TypeError, match=message.format(layout)):
            torchkiln.spmm(a, full)
    close(torchkiln.spmm(full.to_sparse_csr(), full), full)
    with pytest.raises(ValueError, match=r"spmm: a: got 3 sparse dimensions of a COO tensor"):
        torchkiln.spmm(torch.stack([full, full]).to_sparse(), full)
    batch = torch.stack([full, 2 * full])
    close(torchkiln.spmm(batch.to_sparse_csc(), full), batch)


def test_what_is_no_matrix() -> None:
    with pytest.raises(TypeError, match="spmm: a: got int, expected a sparse tensor or a"):
        torchkiln.spmm(3, torch.ones(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="spmm: a: got tuple"):
        torchkiln.spmm((torch.ones(2),), torch.ones(2, 2))  # type: ignore[arg-type]


FAULTS = {
    "begins late": ([1, 2, 3], [0, 3, 1], "crow: got a first element other than 0, expected 0"),
    "ends early": ([0, 2, 2], [0, 3, 1], "crow: got a last element other than 3, expected 3"),
    "ends late": ([0, 2, 9], [0, 3, 1], "crow: got a last element other than 3, expected 3"),
    "goes back": ([0, 4, 3], [0, 3, 1], "crow: got an element smaller than the one before"),
    "column too large": ([0, 2, 3], [0, 4, 1], "col: got an element outside of the columns"),
    "column negative": ([0, 2, 3], [-1, 3, 1], "expected all from 0 to 3"),
    "twice": ([0, 3, 3], [1, 3, 1], "col: got a column twice in a row, expected each once"),
    "twice, ascending": ([0, 3, 3], [1, 1, 3], "col: got a column twice in a row"),
}


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_that_are_found_on_request(
    device: torch.device, index: torch.dtype, name: str
) -> None:
    begins, places, message = FAULTS[name]
    crow, col = (torch.tensor(x, device=device, dtype=index) for x in (begins, places))
    values, b = torch.ones(3, device=device), torch.ones(4, 2, device=device)
    with pytest.raises(ValueError, match=message):
        torchkiln.spmm((crow, col, values), b, check=True)
    sound = torch.tensor([0, 2, 3], device=device, dtype=index)
    both = torch.stack([sound, crow]), torch.stack([torch.tensor([0, 3, 1]).to(col), col])
    with pytest.raises(ValueError, match=message):
        torchkiln.spmm((*both, values), b, check=True)


OUTSIDE = r"spmm\w*: the pattern has indices outside of its entries or columns; check=True reports"
MEMORY = [name for name in FAULTS if "twice" not in name]


@pytest.mark.parametrize("far", [1, 10**8])
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("name", MEMORY)
def test_bounds_are_checked_on_a_cpu_without_a_request(
    index: torch.dtype, name: str, far: int
) -> None:
    """Invalid indices raise an error, also in a batch; no memory outside of a tensor is read."""
    begins, places, _ = FAULTS[name]
    crow, col = (torch.tensor(x, dtype=index) for x in (begins, places))
    if "column" in name:
        col = torch.where((col < 0) | (col > 3), col * far, col)
    if name in ("ends late", "goes back"):
        crow = torch.where(crow > 3, crow * far, crow)
    values, b = torch.ones(3), torch.ones(4, 2)
    with pytest.raises(RuntimeError, match=OUTSIDE):
        torchkiln.spmm((crow, col, values), b)
    sound = torch.tensor([0, 2, 3], dtype=index)
    both = torch.stack([sound, crow]), torch.stack([torch.tensor([0, 3, 1]).to(col), col])
    with pytest.raises(RuntimeError, match=OUTSIDE):
        torchkiln.spmm((*both, values), b)
    ops, left = torch.ops.torchkiln, torch.ones(2, 5)
    with pytest.raises(RuntimeError, match=OUTSIDE):
        ops._spmm_sampled(crow, col, left, torch.ones(4, 5), None, False)


@pytest.mark.parametrize("part", ["begins", "rows", "order"])
@pytest.mark.parametrize("wrong", [-1, 10**8])
def test_a_given_transposed_pattern_is_checked_on_a_cpu(part: str, wrong: int) -> None:
    crow, col, values = matrix(7, 31, torch.device("cpu"))
    packed = torchkiln.csr_transpose(crow, col, 31)
    packed[{"begins": 3, "rows": 33, "order": 33 + col.numel()}[part]] = wrong
    b = torch.randn(31, 12, requires_grad=True)
    y = torchkiln.spmm((crow, col, values), b, transpose=packed)
    with pytest.raises(RuntimeError, match=OUTSIDE):
        y.sum().backward()


@pytest.mark.parametrize("wrong", [-1, 7, 10**8])
def test_columns_that_are_summed_in_place_are_checked_on_a_cpu(wrong: int) -> None:
    crow, col, values = matrix(31, 7, torch.device("cpu"))
    b = torch.randn(7, 12, requires_grad=True)
    y = torchkiln.spmm((crow, col, values), b)
    col.data[5] = wrong  # .data, because autograd refuses other changes of saved tensors
    with pytest.raises(RuntimeError, match=OUTSIDE):
        y.sum().backward()


def test_columns_in_any_order_are_sound(device: torch.device) -> None:
    crow = torch.tensor([0, 3, 4], device=device)
    col = torch.tensor([3, 0, 1, 3], device=device)
    values, b = torch.randn(4, device=device), torch.randn(4, 2, device=device)
    close(torchkiln.spmm((crow, col, values), b, check=True), dense(values, crow, col, 4) @ b)


@pytest.mark.parametrize("strided", ["crow", "col"])
def test_indices_of_any_strides(device: torch.device, strided: str) -> None:
    crow, col, values = matrix(13, 9, device)
    b = torch.randn(9, 6, device=device)
    expected = torchkiln.spmm((crow, col, values), b)
    if strided == "crow":
        crow = torch.stack([crow, crow + 1], dim=-1)[:, 0]
    else:
        col = torch.stack([col, col + 1], dim=-1)[:, 0]
    assert torch.equal(torchkiln.spmm((crow, col, values), b), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_longer_than_all_others(device: torch.device, dtype: torch.dtype) -> None:
    """A long row is cut into pieces; it and the short rows around it agree with float64."""
    columns, rows = 4001, 41
    full = torch.zeros(rows, columns, dtype=torch.float64, device=device)
    full[7] = torch.randn(columns, dtype=torch.float64, device=device)
    full[20] = torch.randn(columns, dtype=torch.float64, device=device)
    full[:, ::200] = 1
    a = full.to(dtype).to_sparse_csr()
    b = torch.randn(columns, 37, device=device).to(dtype)
    found = torchkiln.spmm(a, b)
    expected = a.to_dense().double() @ b.double()
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(torchkiln.spmm(a, b), found)
    grad = torch.randn(rows, 37, device=device).to(dtype)
    leaf = a.values().clone().requires_grad_()
    y = torchkiln.spmm((a.crow_indices(), a.col_indices(), leaf), b)
    row = torch.arange(rows, device=device).repeat_interleave(a.crow_indices().diff())
    wanted = (grad.double()[row] * b.double()[a.col_indices()]).sum(-1)
    got = torch.autograd.grad(y, leaf, grad)[0].double()
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


PATTERNS = {
    "few entries": (27, 42, 108),
    "tall": (3223, 24, 20000),
    "flat": (5, 2000, 6000),
    "many entries": (300, 2000, 40000),
    "many rows": (5888, 4, 5215),
    "eight columns": (2424, 8, 15000),
    "one column": (8996, 1, 9000),
    "one long row": (60, 2000, 2500),
    "one long row of many": (1500, 2000, 5000),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 6, 12, 16, 37, 64, 130, 333, 422, 1100])
@pytest.mark.parametrize("name", PATTERNS)
def test_rows_of_any_width(device: torch.device, name: str, width: int, dtype: torch.dtype) -> None:
    """Product and gradients agree with float64: all sizes of vectors, several warps per row, and
    columns with so many entries that they are split.
    """
    rows, columns, entries = PATTERNS[name]
    torch.manual_seed(width)
    places = torch.randint(rows * columns, (entries,), device=device)
    if name.startswith("one long row"):
        places[500:] %= columns
    places = places.unique()
    row, col = places // columns, places % columns
    crow = torch.searchsorted(row, torch.arange(rows + 1, device=device))
    values, b, grad = (
        torch.randn(shape, device=device).to(dtype)
        for shape in ((col.numel(),), (columns, width), (rows, width))
    )
    if name == "few entries":  # NaN after each row must not be read
        b, grad = (torch.nn.functional.pad(t, (0, 8), value=torch.nan)[:, :-8] for t in (b, grad))
    leaves = values.requires_grad_(), b.requires_grad_()
    y = torchkiln.spmm((crow, col, values), b)
    found = (y.detach(), *torch.autograd.grad(y, leaves, grad))
    wide = values.detach().double(), b.detach().double(), grad.double()

    def truth(values: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        full = values.new_zeros(rows, columns).index_put((row, col), values)
        return full @ b, (grad @ b.T)[row, col], full.T @ grad

    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    sizes = truth(*(tensor.abs() for tensor in wide))
    for one, expected, size in zip(found, truth(*wide), sizes, strict=True):
        least = torch.finfo(dtype).tiny
        assert bool(((one.double() - expected).abs() <= tolerance * size + least).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 24, 200])
def test_columns_are_read_in_place(device: torch.device, width: int, dtype: torch.dtype) -> None:
    """Few entries read columns in place, many read a copy in rows; both agree with float64."""
    crow, col, values = matrix(50, 40, device)
    spread = col * 100 + 3
    values = values.to(dtype)
    b = torch.randn(2, width, 4000, device=device).to(dtype)
    copied = b.mT.contiguous()
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps
    each = values.double(), copied[:, 3::100].double()
    size = dense(each[0].abs(), crow, col, 40) @ each[1].abs()
    expected = dense(each[0], crow, col, 40) @ each[1]
    for given in (b.mT, copied):
        y = torchkiln.spmm((crow, spread, values), given)
        assert bool(((y.double() - expected).abs() <= tolerance * size + 1e-7).all())
        assert torch.equal(torchkiln.spmm((crow, spread, values), given[1]), y[1])
    if device.type == "cuda" and width > 1:
        found = torchkiln.explain(torchkiln.spmm, (crow, spread, values), b.mT)
        assert "columns of the dense matrix, without a copy" in str(found)
        found = torchkiln.explain(torchkiln.spmm, (crow, col, values), b[..., :40].mT.mT.mT)
        assert "without a copy" not in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 300, 2500])
def test_gradient_of_values_reads_columns_in_place(
    device: torch.device, width: int, dtype: torch.dtype
) -> None:
    """Columns are read in place for few entries, with one block per entry."""
    crow, col, values = matrix(13, 9, device)
    spread = col * 100 + 3
    values = values.to(dtype).requires_grad_()
    b = torch.randn(width, 900, device=device).to(dtype).t()
    grad = torch.randn(13, width, device=device).to(dtype)
    row = torch.arange(13, device=device).repeat_interleave(crow.diff())
    terms = grad.double()[row] * b.double()[spread]
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps
    for given in (b, b.contiguous()):
        y = torchkiln.spmm((crow, spread, values), given)
        (found,) = torch.autograd.grad(y, values, grad)
        error = (found.double() - terms.sum(1)).abs()
        assert bool((error <= tolerance * terms.abs().sum(1) + 1e-7).all())
    if device.type == "cuda" and width > 1:
        assert "one block per entry" in str(
            torchkiln.explain(torchkiln.spmm, (crow, spread, values), b)
        )


def test_a_shared_matrix_is_not_copied(device: torch.device) -> None:
    """A matrix or pattern that a batch shares by expand() is read in place."""
    crow, col, values = matrix(12, 6, device)
    b = torch.randn(5, 6, 4, device=device)
    expected = torchkiln.spmm((crow, col, values), b)
    every = tuple(t.expand(5, -1) for t in (crow, col, values))
    assert torch.equal(torchkiln.spmm(every, b), expected)  # type: ignore[arg-type]
    for i in range(5):
        assert torch.equal(torchkiln.spmm((crow, col, values), b[i]), expected[i])


def test_check_is_refused_under_a_transform() -> None:
    crow, col, values = matrix(5, 4, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="spmm: check: got True under a transform"):
        torch.func.vmap(lambda b: torchkiln.spmm((crow, col, values), b, check=True))(
            torch.ones(2, 4, 3)
        )


def test_linear_is_the_dense_layer(device: torch.device) -> None:
    torch.manual_seed(0)
    layer = torchkiln.nn.SparseLinear(20, 7, density=0.3).to(device)
    assert layer.col.numel() == 7 * 6
    x = torch.randn(3, 4, 20, device=device, requires_grad=True)
    y = layer(x)
    weight = layer.dense_weight()
    expected = torch.nn.functional.linear(x, weight, layer.bias)
    close(y, expected)
    grad = torch.randn_like(y)
    wanted = (x, layer.values, layer.bias)
    for one, other in zip(
        torch.autograd.grad(y, wanted, grad),  # type: ignore[arg-type]
        torch.autograd.grad(expected, wanted, grad),  # type: ignore[arg-type]
        strict=True,
    ):
        close(one, other)


def test_linear_takes_its_pattern_from_its_state() -> None:
    torch.manual_seed(1)
    one, other = (torchkiln.nn.SparseLinear(20, 7, density=0.3) for _ in range(2))
    assert not torch.equal(one.col, other.col)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.transpose, one.transpose)
    x = torch.randn(5, 20)
    assert torch.equal(other(x), one(x))


def test_linear_refuses_a_density() -> None:
    with pytest.raises(ValueError, match=r"SparseLinear: density: got 0, expected a number above"):
        torchkiln.nn.SparseLinear(3, 4, density=0)
