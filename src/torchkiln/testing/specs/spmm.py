"""The contract of sparse products."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.ops.spmm import spmm_csr
from torchkiln.testing.compare import steps
from torchkiln.testing.data import drawn_sizes, normal
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample
from torchkiln.testing.spec import OpSpec

# Rows, columns and width for each kind of kernel: one element per thread, one vector and sizes just
# below and above, several tiles; rows with many entries and with none.
SHAPES: Mapping[str, tuple[int, int, int]] = (
    {"typical": (4, 5, 8), "one": (1, 1, 1)}
    | {"no rows": (0, 5, 4), "no columns": (5, 0, 4), "no width": (5, 4, 0)}
    | {"prime": (7, 13, 11), "narrow": (23, 17, 2)}
    | {"vector less one": (9, 31, 15), "vector": (9, 31, 16), "vector and one": (9, 31, 17)}
    | {"two tiles": (6, 9, 264), "many rows": (1031, 5, 3), "long rows": (3, 2053, 5)}
)


def pattern(
    rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.int64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Indices of about a third of the elements; every fifth row is empty, row 1 is full."""
    place = torch.arange(rows * columns).reshape(rows, columns)
    there = (place * 7919 + place // 5 + seed) % 3 == 0
    there[::5] = False
    there[1:2] = True
    crow = torch.zeros(rows + 1, dtype=torch.int64)
    crow[1:] = there.sum(1).cumsum(0)
    col = there.nonzero(as_tuple=True)[1].clone()
    return crow.to(device, dtype), col.to(device, dtype)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape, then with options, then with batches of all or some parts."""

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
    # Two patterns with the same number of entries.
    second = (short[0], (short[1] + 1) % 4)
    crow, col = (torch.stack(pair) for pair in zip(short, second, strict=True))
    yield sample("batch of patterns", shape, crow, col, ((2,), (2,)))
    yield sample("batch of patterns alone", shape, crow, col)
    packed, both = torchkiln.csr_transpose(crow, col, 4), ((2,), (2,))
    yield sample("batch of patterns, transposed", shape, crow, col, both, transpose=packed)
    shared = crow[:1].expand(3, -1), col[:1].expand(3, -1)
    yield sample("pattern expanded to a batch", shape, *shared, ((3,), ()))
    yield sample("no batch", shape, *short, ((0,), (0,)))
    # Entries in random order, one of them twice.
    begins = torch.tensor([0, 3, 3, 7], device=device)
    places = torch.tensor([2, 0, 2, 3, 1, 0, 4], device=device)
    yield sample("in no order", (3, 5, 4), begins, places)


def dense(values: Tensor, crow: Tensor, col: Tensor, columns: int) -> Tensor:
    """The sparse matrix, or a batch of them, with all elements."""
    batch = next((t.shape[0] for t in (values, crow, col) if t.dim() == 2), None)
    if batch is None:
        zeros = values.new_zeros(crow.numel() - 1, columns)
        rows = torch.repeat_interleave(crow.diff().long(), output_size=col.numel())
        return zeros.index_put((rows, col.long()), values, accumulate=True)
    each = [t if t.dim() == 2 else t.expand(batch, -1) for t in (values, crow, col)]
    found = [dense(v, r, c, columns) for v, r, c in zip(*each, strict=True)]
    if not found:  # an empty batch that has a gradient
        return values.sum().expand(0, crow.shape[-1] - 1, columns)
    return torch.stack(found)


def reference(values: Tensor, b: Tensor, *, crow: Tensor, col: Tensor, **_: Any) -> Tensor:
    """The product of the sparse matrix, made dense, with ``b``."""
    return dense(values, crow, col, b.shape[-2]) @ b


def composite(values: Tensor, b: Tensor, *, crow: Tensor, col: Tensor, **_: Any) -> Tensor:
    """Torch's sparse product for large matrices if it exists, else the dense product."""
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
    """The sums of the absolute values, times the growth of errors in the longest row."""
    crow = kwargs["crow"]
    longest = int(crow.diff(dim=-1).max()) if crow.shape[-1] > 1 and crow.numel() else 0
    return reference(values.abs(), b.abs(), **kwargs) * steps(longest)


def gradient_magnitude(values: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    """A function whose gradients are sums of absolute values, times the growth of errors."""
    col = kwargs["col"]
    counts = [torch.bincount(one) for one in col.reshape(-1, col.shape[-1])] if col.numel() else []
    longest = max((int(count.max()) for count in counts), default=0)
    by_values = reference(values, b.detach().abs(), **kwargs)
    return by_values + reference(values.detach().abs(), b, **kwargs) * steps(longest)


def wider(sample: Sample) -> Sample:
    """The call with twice the columns of b. The pattern is kept, as it is no input of the graph."""
    values, b = sample.args
    return replace(sample, args=(values, torch.cat([b, b], dim=-1)))


def multiplied(name: str, rows: int, entries: int, b: Tensor) -> Sample:
    """A call of a sparse matrix with up to ``entries`` entries at random positions, and ``b``."""
    columns, device = b.shape[0], b.device
    places = torch.randint(rows * columns, (entries,), device=device).unique()
    crow = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    crow[1:] = torch.bincount(places // columns, minlength=rows).cumsum(0)
    values = torch.randn(places.shape, device=device, dtype=b.dtype)
    return Sample(name, (values, b), {"crow": crow, "col": places % columns})


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call of a square matrix with 1 % of its elements (0.1 % if large), and a dense one."""
    rows, width = shape
    entries = int(rows * rows * (0.01 if rows <= 16384 else 0.001))
    b = torch.randn(rows, width, device=device, dtype=dtype)
    return multiplied("bench", rows, max(1, entries), b)


def drawn(device: torch.device, dtype: torch.dtype, rng: Random, most: int) -> Sample:
    """A call of rows with up to 1, 4, 16 or 64 entries on average, and a matrix of random width.

    No entry occurs twice: backward of torch's sparse tensors refuses duplicates.
    """
    rows, columns = (drawn_sizes(rng, min(most, 1 << 17), 1)[0] for _ in range(2))
    width = drawn_sizes(rng, max(1, min(most // max(rows, columns), 1 << 13)), 1)[0]
    entries = min(rows * rng.choice((1, 4, 16, 64)), rows * columns, 1 << 22)
    b = torch.randn(columns, width, device=device, dtype=dtype)
    return multiplied("drawn", rows, entries, b)


def operations(sample: Sample) -> tuple[int, int]:
    """A multiplication and an addition for each entry and column; backward has two products."""
    values, b = sample.args
    terms = values.numel() * b.shape[-1]
    return 2 * terms, 4 * terms


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with sizes and patterns that do not match, but no errors that only ``check`` finds."""
    values, b = torch.ones(3, device=device), torch.ones(4, 2, device=device)
    crow, col = torch.tensor([0, 2, 3], device=device), torch.tensor([0, 3, 1], device=device)
    sample = Sample("good", (values, b), {"crow": crow, "col": col})
    good = GoodCall(torch.ops.torchkiln.spmm_csr.default, sample, "spmm")
    for name, wrong, expected in (
        ("values", values.reshape(1, 1, 3), "[entries] or [batch, entries]"),
        ("b", b[:, 0], "a matrix or a batch of matrices"),
        ("crow", crow[:0], "at least one element, the end of the last row"),
        ("col", col.reshape(1, 3), "[entries], as crow has no batch"),
    ):
        words = f"{name}: got shape {list(wrong.shape)}, expected {expected}"
        yield good.changed(words, **{name: wrong})
    size = "{}: got size {} in dimension 0 of shape {}, expected {}"
    words = size.format("values", 4, [4], "3, the number of entries in col")
    yield good.changed(words, values=torch.ones(4, device=device))
    words = size.format("crow", 3, [3], "6, one more than the rows of the shape")
    yield good.changed(words, shape=(5, 4))
    words = size.format("b", 4, [4, 2], "7, the columns of the sparse matrix")
    yield good.changed(words, shape=(2, 7))
    words = "b: got a batch of 3 in shape [3, 4, 2], expected 2, that of values, or no batch"
    yield good.changed(words, values=values.expand(2, 3), b=b.expand(3, 4, 2))
    yield good.changed("shape: got [4], expected [rows, columns]", shape=(4,))
    yield good.changed("crow: got dtype float32, expected int32 or int64", crow=crow.float())
    yield good.changed("col: got dtype int32, expected int64, the dtype of crow", col=col.int())
    words = "got int64 [3], expected the result of torchkiln.csr_transpose() for this pattern"
    yield good.changed(f"transpose: {words}", transpose=crow)
    words = "transpose: got the transpose of a pattern with 5 columns, expected 4"
    yield good.changed(words, transpose=torch.zeros(12, dtype=torch.int32, device=device))


def module(device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A layer with the same pattern and values in every run."""
    weight = normal("weight", (9, 13), device, dtype)
    bias = normal("bias", (9,), device, dtype)
    return torchkiln.nn.SparseLinear.from_dense(weight * (weight > 0.5), bias)


def module_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows for :func:`module`."""
    return (normal("x", (2, 5, 13), device, dtype),)


SPMM_CSR = OpSpec(
    op=spmm_csr,
    reference=reference,
    composite=composite,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    refusals=Refusals(dtypes={"b": "values"}, first="crow", called="spmm"),
    invalid=invalid,
    bench=bench,
    drawn=drawn,
    large=None,
    operations=operations,
    differentiable=(0, 1),
    grown=wider,
    autocast=(0, 1),
    waits_for=("check",),
    bench_shapes=((16384, 128), (65536, 64)),
    small_shapes=((64, 64), (1024, 64), (4096, 64)),
    opaque=True,
    excluded={
        "not_finite": "an entry that is not stored multiplies nothing; the formula has 0 * inf"
    },
    helpers=("_spmm_transposed", "_spmm_sampled", "csr_transpose"),
    module=module,
    module_inputs=module_inputs,
)
