"""The contract of sparse products."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.testing.compare import steps
from torchkiln.testing.data import normal
from torchkiln.testing.spec import OpSpec, Sample, Traffic
from torchkiln.testing.specs.spmm_invalid import invalid

if TYPE_CHECKING:
    from collections.abc import Iterator

# Rows, columns and width: rows and widths of every kind that kernels treat differently (one lane of
# a thread, a vector and its neighbours, several tiles), and rows of many and of no entries.
SHAPES: dict[str, tuple[int, int, int]] = {
    "typical": (4, 5, 8),
    "one": (1, 1, 1),
    "no rows": (0, 5, 4),
    "no columns": (5, 0, 4),
    "no width": (5, 4, 0),
    "prime": (7, 13, 11),
    "narrow": (23, 17, 2),
    "vector less one": (9, 31, 15),
    "vector": (9, 31, 16),
    "vector and one": (9, 31, 17),
    "two tiles": (6, 9, 264),
    "many rows": (1031, 5, 3),
    "long rows": (3, 2053, 5),
}


def pattern(
    rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.int64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Where about a third of the elements lie; every fifth row is empty, row 1 is full."""
    place = torch.arange(rows * columns).reshape(rows, columns)
    there = (place * 7919 + place // 5 + seed) % 3 == 0
    there[::5] = False
    there[1:2] = True
    crow = torch.zeros(rows + 1, dtype=torch.int64)
    crow[1:] = there.sum(1).cumsum(0)
    col = there.nonzero(as_tuple=True)[1].clone()
    return crow.to(device, dtype), col.to(device, dtype)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Shapes, then batches that share all, some or nothing."""

    def sample(
        name: str,
        sizes: tuple[int, int, int],
        crow: Tensor,
        col: Tensor,
        batches: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        **kwargs: Any,
    ) -> Sample:
        _, columns, width = sizes
        values = normal("values", (*batches[0], col.shape[-1]), device, dtype)
        b = normal("b", (*batches[1], columns, width), device, dtype)
        return Sample(name, (values, b), {"crow": crow, "col": col, **kwargs})

    for name, sizes in SHAPES.items():
        yield sample(name, sizes, *pattern(*sizes[:2], device))
    shape = (6, 4, 5)
    short = pattern(6, 4, device, torch.int32)
    yield sample("int32 indices", shape, *short)
    yield sample("of a shape", shape, *short, shape=(6, 4))
    yield sample("checked", shape, *short, check=True)
    packed = torchkiln.csr_transpose(*short, 4)
    yield sample("transposed pattern", shape, *short, transpose=packed)
    yield sample("batch of values and of matrices", shape, *short, ((2,), (2,)))
    yield sample("batch of matrices", shape, *short, ((), (2,)))
    yield sample("batch of values", shape, *short, ((2,), ()))
    # Of as many entries each.
    second = (short[0], (short[1] + 1) % 4)
    crow, col = (torch.stack(pair) for pair in zip(short, second, strict=True))
    yield sample("batch of patterns", shape, crow, col, ((2,), (2,)))
    yield sample("batch of patterns alone", shape, crow, col)
    yield sample("batch of patterns, transposed", shape, crow, col, ((2,), (2,)),
                 transpose=torchkiln.csr_transpose(crow, col, 4))  # fmt: skip
    shared = crow[:1].expand(3, -1), col[:1].expand(3, -1)
    yield sample("pattern expanded to a batch", shape, *shared, ((3,), ()))
    yield sample("no batch", shape, *short, ((0,), (0,)))
    # Entries in no order, one of them twice.
    begins = torch.tensor([0, 3, 3, 7], device=device)
    places = torch.tensor([2, 0, 2, 3, 1, 0, 4], device=device)
    yield sample("in no order", (3, 5, 4), begins, places)


def rows_of(crow: Tensor, entries: int) -> Tensor:
    """The row of each entry."""
    return torch.repeat_interleave(crow.diff().long(), output_size=entries)


def dense(values: Tensor, crow: Tensor, col: Tensor, columns: int) -> Tensor:
    """The sparse matrix in full, or the batch of them."""
    batch = next((t.shape[0] for t in (values, crow, col) if t.dim() == 2), None)
    if batch is None:
        zeros = values.new_zeros(crow.numel() - 1, columns)
        places = rows_of(crow, col.numel()), col.long()
        return zeros.index_put(places, values, accumulate=True)
    each = [t if t.dim() == 2 else t.expand(batch, -1) for t in (values, crow, col)]
    found = [dense(v, r, c, columns) for v, r, c in zip(*each, strict=True)]
    if not found:  # nothing, with a gradient
        return values.sum().expand(0, crow.shape[-1] - 1, columns)
    return torch.stack(found)


def reference(values: Tensor, b: Tensor, *, crow: Tensor, col: Tensor, **_: Any) -> Tensor:
    """The product of the matrices in full."""
    return dense(values, crow, col, b.shape[-2]) @ b


def composite(values: Tensor, b: Tensor, *, crow: Tensor, col: Tensor, **_: Any) -> Tensor:
    """The same; of large matrices what torch has for sparse ones.

    It knows no batch, and no half precision on the CPU.
    """
    sizes = crow.shape[-1] - 1, b.shape[-2]
    is_batch = values.dim() > 1 or crow.dim() > 1
    has_none = values.dtype in (torch.float16, torch.bfloat16) and not values.is_cuda
    if sizes[0] * sizes[1] < 1 << 20 or is_batch or has_none:
        return reference(values, b, crow=crow, col=col)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        matrix = torch.sparse_csr_tensor(crow, col, values, sizes, check_invariants=False)
    return matrix @ b


def magnitude(values: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    """The sum of the absolute values, and how often that of the longest row is rounded."""
    crow = kwargs["crow"]
    longest = int(crow.diff(dim=-1).max()) if crow.shape[-1] > 1 and crow.numel() else 0
    return reference(values.abs(), b.abs(), **kwargs) * steps(longest)


def gradient_magnitude(values: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    """A function whose gradients are the sums of the absolute values of the terms.

    Those of b are a product with the transposed matrix, whose rows are the columns.
    """
    col = kwargs["col"]
    counts = [torch.bincount(one) for one in col.reshape(-1, col.shape[-1])] if col.numel() else []
    longest = max((int(count.max()) for count in counts), default=0)
    by_values = reference(values, b.detach().abs(), **kwargs)
    return by_values + reference(values.detach().abs(), b, **kwargs) * steps(longest)


def wider(sample: Sample) -> Sample:
    """The same matrix times twice as many columns: patterns are no inputs of a graph."""
    values, b = sample.args
    return replace(sample, args=(values, torch.cat([b, b], dim=-1)))


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A square matrix of so many rows with 1 % stored (0.1 % of a large one); so many columns."""
    rows, width = shape
    density = 0.01 if rows <= 16384 else 0.001
    places = torch.randint(
        rows * rows, (max(1, int(rows * rows * density)),), device=device
    ).unique()
    crow = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    crow[1:] = torch.bincount(places // rows, minlength=rows).cumsum(0)
    values = torch.randn(places.shape, device=device, dtype=dtype)
    b = torch.randn(rows, width, device=device, dtype=dtype)
    return Sample("bench", (values, b), {"crow": crow, "col": places % rows})


def moved(sample: Sample) -> tuple[int, int, int]:
    """Bytes of the sparse matrix, of b and of the result."""
    values, b = sample.args
    crow, col = sample.kwargs["crow"], sample.kwargs["col"]
    sparse = values.nbytes + crow.nbytes + col.nbytes
    return sparse, b.nbytes, (crow.shape[-1] - 1) * b.shape[-1] * b.itemsize


def traffic(sample: Sample) -> Traffic:
    """Reads the sparse matrix and b once, writes the result."""
    values, b = sample.args
    return Traffic(sum(moved(sample)), 2 * values.numel() * b.shape[-1])


def backward_traffic(sample: Sample) -> Traffic:
    """Reads the sparse matrix, b and the incoming gradient, writes both gradients."""
    values, b = sample.args
    total = sum(moved(sample)) + values.nbytes + b.nbytes
    return Traffic(total, 4 * values.numel() * b.shape[-1])


def module(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A layer with a pattern and values that depend on nothing."""
    weight = normal("weight", (9, 13), device, dtype)
    bias = normal("bias", (9,), device, dtype)
    return torchkiln.nn.SparseLinear.from_dense(weight * (weight > 0.5), bias)


def module_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows for :func:`module`."""
    return (normal("x", (2, 5, 13), device, dtype),)


SPMM_CSR = OpSpec(
    name="spmm_csr",
    op=torchkiln.spmm_csr,
    overload=torch.ops.torchkiln.spmm_csr.default,
    reference=reference,
    composite=composite,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    invalid=invalid,
    bench=bench,
    large=None,
    traffic=traffic,
    backward_traffic=backward_traffic,
    differentiable=(0, 1),
    grown=wider,
    autocast=(0, 1),
    waits_for=("check",),
    bench_shapes=((16384, 128), (65536, 64)),
    small_shapes=((64, 64), (1024, 64), (4096, 64)),
    opaque=True,
    excluded={
        "not_finite": "what is not stored multiplies nothing, where the formula has 0 * infinity"
    },
    helpers=("spmm_transposed", "spmm_sampled", "spmm_transpose"),
    module=module,
    module_inputs=module_inputs,
)
