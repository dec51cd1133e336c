"""Products of sparse CSR matrices and dense matrices, with optional batches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops.eager import eager

Csr = Tensor | tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Sequence[int]]
"""A sparse CSR tensor of torch, or ``(crow, col, values)``, or ``(crow, col, values, [rows,
columns])``."""


def spmm(a: Csr, b: Tensor, *, transpose: Tensor | None = None, check: bool = False) -> Tensor:
    """Returns ``a @ b``, contiguous and bitwise reproducible.

    Row ``r`` of ``a`` has the entries ``e`` with ``crow[r] <= e < crow[r + 1]``: ``values[e]`` in
    column ``col[e]``, in any order. Entries with equal indices are added. Each of
    ``crow [rows + 1]``, ``col [entries]``, ``values [entries]`` and ``b`` may have a batch as its
    first dimension. Operands without one are shared by the batch and are not copied.

    Args:
        a: a tensor in layout ``torch.sparse_csr``, or a tuple of its parts. Indices are int32 or
            int64. ``.to_sparse_csr()`` converts COO and CSC.
        b: ``[columns, width]`` or ``[batch, columns, width]``; float32, float64, float16 or
            bfloat16, of the dtype of the values. Half precision is computed in float32 and rounded
            once.
        transpose: :func:`csr_transpose` of the pattern. Without it, backward for ``b`` computes the
            transposed pattern in every call, which takes about as long as a product with
            ``width = 64``.
        check: whether to validate the pattern: ``crow`` ascends from 0 to the number of entries,
            ``col`` is in range, and no entry occurs twice. The check reads the indices once, builds
            the transposed pattern if the columns of a row do not ascend, and waits for the GPU.
            Without it an invalid pattern reads and, in backward, writes out of bounds.
    """
    if isinstance(a, Tensor):
        if a.layout != torch.sparse_csr:
            raise TypeError(
                f"torchkiln.spmm: a: got layout {a.layout}, expected torch.sparse_csr; call "
                ".to_sparse_csr() first"
            )
        if a.dim() > 3:
            raise ValueError(
                f"torchkiln.spmm: a: got shape {list(a.shape)}, expected [rows, columns] or "
                "[batch, rows, columns]"
            )
        crow, col, values = a.crow_indices(), a.col_indices(), a.values()
        shape: Sequence[int] | None = a.shape[-2:]
        if values.dim() != crow.dim():
            raise ValueError(
                f"torchkiln.spmm: a: got values of shape {list(values.shape)}, expected a number "
                "for each entry"
            )
    elif isinstance(a, tuple) and len(a) in (3, 4):  # type: ignore[redundant-expr]
        crow, col, values = a[:3]
        shape = a[3] if len(a) == 4 else None
    else:
        raise TypeError(
            f"torchkiln.spmm: a: got {type(a).__name__}, expected a sparse CSR tensor or a tuple "
            "(crow, col, values, shape)"
        )
    return spmm_csr(values, b, crow, col, shape=shape, transpose=transpose, check=check)


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

    The result is one int32 tensor of shape ``[columns + 1 + 2 * entries]``, or
    ``[batch, columns + 1 + 2 * entries]`` for a pattern with a batch. A stable sort keeps the
    entries in the order of their rows, so the result is deterministic. There must be fewer than
    ``2**31`` entries in total.

    Args:
        crow: as for :func:`spmm_csr`.
        col: as for :func:`spmm_csr`.
        columns: number of columns of the sparse matrix.
    """
    return torch.ops.torchkiln.spmm_transpose.default(crow, col, columns)
