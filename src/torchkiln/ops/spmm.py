"""Products of sparse and dense matrices, with optional batches."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from torchkiln import _C
from torchkiln.ops.eager import eager, is_foreign

Sparse = Tensor | tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Sequence[int]]
"""A sparse tensor of torch, or ``(crow, col, values)``, or these and ``[rows, columns]``."""


def spmm(a: Sparse, b: Tensor, *, transpose: Tensor | None = None, check: bool = False) -> Tensor:
    """Returns ``a @ b``, contiguous and bitwise reproducible.

    Row ``r`` of ``a`` has the entries ``e`` with ``crow[r] <= e < crow[r + 1]``: ``values[e]`` in
    column ``col[e]``, in any order. Entries with equal indices are added. Each of
    ``crow [rows + 1]``, ``col [entries]``, ``values [entries]`` and ``b`` may have a batch as its
    first dimension. Operands without one are shared by the batch and are not copied.

    Args:
        a: a tensor in layout ``torch.sparse_csr``, or a tuple of its parts. Indices are int32 or
            int64. COO and CSC are accepted, too, and converted in every call, which sorts the
            entries: call ``.to_sparse_csr()`` once if ``a`` is used often.
        b: ``[columns, width]`` or ``[batch, columns, width]``; float32, float64, float16 or
            bfloat16, of the dtype of the values. Half precision is computed in float32 and rounded
            once. A vector ``[columns]`` counts as one column, and the result is a vector, too.
        transpose: :func:`csr_transpose` of the pattern. Without it, backward for ``b`` computes the
            transposed pattern in every call, which takes about as long as a product with
            ``width = 64``. On a GPU a matrix without a batch and with known sizes needs none if it
            has at most 32 columns and stores at least a sixteenth of its elements.
        check: whether to validate the pattern: ``crow`` ascends from 0 to the number of entries,
            ``col`` is in range, and no entry occurs twice. The check reads the indices once, builds
            the transposed pattern if the columns of a row do not ascend, and waits for the GPU.
            Without ``check`` a CPU still refuses indices out of bounds, at no extra pass. On a GPU
            an invalid pattern then reads and, in backward, writes out of bounds.
    """
    if isinstance(a, Tensor):
        crow, col, values, shape = parts(a)
    elif isinstance(a, tuple) and len(a) in (3, 4):  # type: ignore[redundant-expr]
        crow, col, values = a[:3]
        shape = a[3] if len(a) == 4 else None
    elif is_foreign(a):
        return handle_torch_function(spmm, (a, b), a, b, transpose=transpose, check=check)
    else:
        raise TypeError(
            f"torchkiln.spmm: a: got {type(a).__name__}, expected a sparse tensor or a tuple "
            "(crow, col, values, shape)"
        )
    if not isinstance(b, Tensor) and is_foreign(b):  # type: ignore[unreachable]
        return handle_torch_function(  # type: ignore[unreachable]
            spmm, (a, b), a, b, transpose=transpose, check=check
        )
    if isinstance(b, Tensor) and b.dim() == 1:  # type: ignore[redundant-expr]
        b = b.unsqueeze(1)
        y = spmm_csr(values, b, crow, col, shape=shape, transpose=transpose, check=check)
        return y.squeeze(-1)
    return spmm_csr(values, b, crow, col, shape=shape, transpose=transpose, check=check)


def parts(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Sequence[int] | None]:
    """Pattern, values and shape of a sparse tensor in CSR. COO and CSC are converted."""
    if a.layout not in (torch.sparse_csr, torch.sparse_coo, torch.sparse_csc):
        raise TypeError(
            f"torchkiln.spmm: a: got layout {a.layout}, expected torch.sparse_csr, "
            "torch.sparse_csc or torch.sparse_coo; call .to_sparse_csr() first"
        )
    if a.dim() > 3:
        raise ValueError(
            f"torchkiln.spmm: a: got shape {list(a.shape)}, expected [rows, columns] or "
            "[batch, rows, columns]"
        )
    if a.layout == torch.sparse_coo and a.sparse_dim() != 2:
        raise ValueError(
            f"torchkiln.spmm: a: got {a.sparse_dim()} sparse dimensions of a COO tensor, expected "
            "2; for a batch pass a tensor in layout torch.sparse_csr"
        )
    csr = a if a.layout == torch.sparse_csr else a.to_sparse_csr()
    crow, col, values = csr.crow_indices(), csr.col_indices(), csr.values()
    if values.dim() != crow.dim():
        raise ValueError(
            f"torchkiln.spmm: a: got values of shape {list(values.shape)}, expected a number "
            "for each entry"
        )
    return crow, col, values, a.shape[-2:]


@eager(_C.spmm_csr)
def spmm_csr(
    values: Tensor,
    b: Tensor,
    crow: Tensor,
    col: Tensor,
    *,
    shape: Sequence[int] | None = None,
    transpose: Tensor | None = None,
    check: bool = False,
) -> Tensor:
    """Computes :func:`spmm` from the parts of a sparse matrix.

    Args:
        values: ``[entries]`` or ``[batch, entries]``.
        b: as for :func:`spmm`.
        crow: ``[rows + 1]`` or ``[batch, rows + 1]``; int32 or int64.
        col: ``[entries]`` or ``[batch, entries]``, of the dtype of ``crow``.
        shape: ``[rows, columns]``, which ``crow`` and ``b`` are checked against.
        transpose: as for :func:`spmm`.
        check: as for :func:`spmm`.
    """
    return torch.ops.torchkiln.spmm_csr.default(
        values, b, crow, col, shape=shape, transpose=transpose, check=check
    )


def csr_transpose(crow: Tensor, col: Tensor, columns: int) -> Tensor:
    """Computes the transposed pattern for the argument ``transpose`` of :func:`spmm`.

    The result is one int32 tensor, which is opaque: pass it on. It is deterministic. There must be
    fewer than ``2**31`` entries in total.

    Args:
        crow: ``[rows + 1]`` or ``[batch, rows + 1]``; int32 or int64.
        col: ``[entries]`` or ``[batch, entries]``, of the dtype of ``crow``.
        columns: number of columns of the sparse matrix.
    """
    return torch.ops.torchkiln.csr_transpose.default(crow, col, columns)
