"""Transposed patterns of sparse matrices."""

from __future__ import annotations

import pytest
import torch

import torchkiln
from torchkiln.testing.contract.repeat import threads
from torchkiln.testing.specs.spmm import dense, pattern

# Torch warns when a sparse tensor is created.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

INDICES = (torch.int32, torch.int64)


@pytest.mark.parametrize("index", INDICES)
def test_transposed_pattern(device: torch.device, index: torch.dtype) -> None:
    """Entries are in the order of columns, and within a column in their original order."""
    crow, col = pattern(31, 7, device, index)
    values = torch.randn(col.shape, device=device)
    packed = torchkiln.csr_transpose(crow, col, 7)
    entries = col.numel()
    begins, rows, order = packed.split([8, entries, entries])
    expected = torch.sort(col.long(), stable=True).indices
    assert torch.equal(order.long(), expected)
    found = torch.sparse_csr_tensor(begins, rows, values[order.long()], (7, 31))
    torch.testing.assert_close(found.to_dense(), dense(values, crow, col, 7).t())
    assert torch.equal(packed, torchkiln.csr_transpose(crow, col, 7))


# Batch, rows, columns, entries. Few entries: a count of smaller ones, by one or four threads each.
# More: a counting sort by one block, by several, or in several rounds; then a radix sort.
PATTERNS = (
    *((2, 8, 39936, 8), (2, 354, 1, 215), (2, 50, 3000, 1500), (2, 9, 1, 5000), (1, 3, 2, 8000)),
    *((20, 40, 60, 2000), (2, 200, 5000, 14656), (2, 3223, 24, 51568), (2, 30, 9000, 5000)),
)


@pytest.mark.parametrize(("batch", "rows", "columns", "entries"), PATTERNS)
@pytest.mark.parametrize("index", INDICES)
def test_transposed_patterns_of_many_entries(
    device: torch.device, index: torch.dtype, batch: int, rows: int, columns: int, entries: int
) -> None:
    """Each of the op's sorts agrees with a stable sort by column."""
    torch.manual_seed(columns)
    row = torch.randint(rows, (batch, entries), device=device).sort().values
    col = torch.randint(columns, (batch, entries), device=device)
    ends = torch.arange(rows + 1, device=device).expand(batch, -1).contiguous()
    crow, col = torch.searchsorted(row, ends).to(index), col.to(index)
    packed = torchkiln.csr_transpose(crow, col, columns)
    begins, places, order = packed.split([columns + 1, entries, entries], dim=-1)
    expected = torch.sort(col, stable=True)
    assert torch.equal(order.long(), expected.indices)
    assert torch.equal(places.long(), row.gather(1, expected.indices))
    ends = torch.arange(columns + 1, device=device).expand(batch, -1).contiguous()
    assert torch.equal(begins.long(), torch.searchsorted(expected.values.long(), ends))
    for i in range(batch):
        assert torch.equal(torchkiln.csr_transpose(crow[i], col[i], columns), packed[i])


def test_a_given_transposed_pattern_changes_no_bit(device: torch.device) -> None:
    crow, col = pattern(31, 7, device)
    values = torch.randn(col.shape, device=device)
    b = torch.randn(7, 12, device=device, requires_grad=True)
    packed = torchkiln.csr_transpose(crow, col, 7)
    grad = torch.randn(31, 12, device=device)
    plain = torchkiln.spmm((crow, col, values), b)
    given = torchkiln.spmm((crow, col, values), b, transpose=packed)
    expected = torch.autograd.grad(plain, b, grad)[0]
    assert torch.equal(torch.autograd.grad(given, b, grad)[0], expected)


@pytest.mark.parametrize("columns", [1, 5, 8, 21, 32])
def test_few_columns_need_no_transposed_pattern(device: torch.device, columns: int) -> None:
    """What is not stored multiplies no infinity, and the order of additions is fixed."""
    rows, width = 3001, 70
    crow, col = pattern(rows, columns, device)
    values = torch.randn(col.shape, device=device)
    b = torch.randn(columns, width, device=device, requires_grad=True)
    grad = torch.randn(rows, width, device=device)
    grad[7, 3] = torch.inf
    y = torchkiln.spmm((crow, col, values), b)
    found, again = (torch.autograd.grad(y, b, grad, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(found, again)
    stored = torch.zeros(columns, dtype=torch.bool, device=device)
    stored[col[crow[7] : crow[8]]] = True
    assert torch.equal(found[:, 3].isinf(), stored)
    found[:, 3] = 0
    grad[:, 3] = 0
    matrix = dense(values, crow, col, columns).double()
    error = (found - matrix.T @ grad.double()).abs()
    assert bool((error <= 1e-5 * (matrix.abs().T @ grad.double().abs())).all())


@pytest.mark.cuda
@pytest.mark.parametrize(("columns", "entries"), [(8, 400), (32, 400), (33, 500), (32, 100)])
def test_which_matrices_have_few_columns(columns: int, entries: int) -> None:
    """At most 32 columns, a sixteenth of whose elements are stored."""
    device = torch.device("cuda")
    places = torch.randperm(64 * columns, device=device)[:entries].sort().values
    crow = torch.searchsorted(places, torch.arange(65, device=device) * columns)
    values = torch.randn(entries, device=device)
    b = torch.randn(columns, 16, device=device, requires_grad=True)
    told = torchkiln.explain(torchkiln.spmm, (crow, places % columns, values), b).backward
    assert told is not None
    is_few = columns <= 32 and entries * 16 >= 64 * columns
    assert ("without a transposed pattern" in " ".join(told.notes)) == is_few


@pytest.mark.parametrize(
    ("columns", "width", "entries", "is_small"),
    [(64, 16, 512, True), (64, 16, 511, False), (64, 1024, 512, True), (64, 1025, 512, False)],
)
def test_which_products_a_cpu_sums_without_a_transposed_pattern(
    columns: int, width: int, entries: int, *, is_small: bool
) -> None:
    """At least 8 entries for each column, and a result of at most 65,536 elements."""
    places = torch.randperm(100 * columns)[:entries].sort().values
    crow = torch.searchsorted(places, torch.arange(101) * columns)
    b = torch.randn(columns, width, requires_grad=True)
    call = (crow, places % columns, torch.randn(entries))
    told = torchkiln.explain(torchkiln.spmm, call, b).backward
    assert told is not None
    assert ("spmm_columns" in str(told)) == is_small


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_a_small_product_for_any_number_of_threads(dtype: torch.dtype) -> None:
    rows, columns, width = 4001, 50, 13
    crow, col = pattern(rows, columns, torch.device("cpu"))
    values = torch.randn(col.shape).to(dtype)
    b = torch.randn(columns, width).to(dtype).requires_grad_()
    grad = torch.randn(rows, width).to(dtype)
    y = torchkiln.spmm((crow, col, values), b)
    found = torch.autograd.grad(y, b, grad, retain_graph=True)[0]
    with threads(3):
        again = torch.autograd.grad(y, b, grad)[0]
    assert torch.equal(found, again)
    matrix = dense(values, crow, col, columns).double()
    exact, terms = matrix.T @ grad.double(), matrix.abs().T @ grad.double().abs()
    allowed = torch.finfo(dtype).eps * exact.abs() + 1e-6 * terms
    assert bool(((found.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_few_rows_of_a_matrix_in_columns_are_read_in_place(dtype: torch.dtype) -> None:
    """A copy of the whole matrix would take longer on a CPU, too."""
    columns, width = 3000, 700
    col = torch.tensor([5, 2999, 17, 17, 0])
    crow = torch.tensor([0, 2, 2, 5])
    values = torch.randn(5).to(dtype).requires_grad_()
    b = torch.randn(width, columns).to(dtype).T.requires_grad_()
    grad = torch.randn(3, width).to(dtype)
    y, z = (torchkiln.spmm((crow, col, values), one) for one in (b, b.contiguous()))
    torch.testing.assert_close(y, z)
    of_y, of_z = (torch.autograd.grad(one, values, grad)[0] for one in (y, z))
    torch.testing.assert_close(of_y, of_z)
