"""Products of sparse matrices in compressed rows with dense ones, of one or of a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._eager import eager

Csr = Tensor | tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Sequence[int]]
"""A sparse CSR tensor of torch's, or its ``(crow, col, values)``, or those and its ``[rows,
columns]``."""


def spmm(a: Csr, b: Tensor, *, transpose: Tensor | None = None, check: bool = False) -> Tensor:
    """Returns ``a @ b``; contiguous, no bit of which depends on the run.

    Row ``r`` of ``a`` has the entries ``crow[r] <= e < crow[r + 1]``: ``values[e]`` in column
    ``col[e]``, in any order; those at one place are added. Each of ``crow [rows + 1]``,
    ``col [entries]``, ``values [entries]`` and ``b`` may have a batch as its first dimension. What
    has none is the same for the whole batch, and is not copied.

    Args:
        a: a tensor in layout ``torch.sparse_csr``, batched or not, or a tuple of its parts, of
            which a batch may share some. Indices are int32 or int64. Other layouts:
            ``.to_sparse_csr()`` converts COO and CSC.
        b: ``[columns, width]`` or ``[batch, columns, width]``; float32, float64, float16 or
            bfloat16, as the values. A half precision is computed in float32 and rounded once.
        transpose: :func:`csr_transpose` of the pattern. Backward for ``b`` builds it, which takes
            about as long as a product of 64 columns; given here it is built once.
        check: whether to refuse a pattern that begins or ends elsewhere than the entries, that goes
            back, that has columns outside of ``a``, or an entry twice. Reads the indices once (and
            where columns do not ascend within a row, builds the transposed pattern), and waits for
            the GPU. Without it such a pattern reads and, in backward,
            writes memory that is not its own.
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
    """:func:`spmm` of the parts of a sparse matrix, those with gradients first.

    Args:
        values: ``[entries]`` or ``[batch, entries]``.
        b: as for :func:`spmm`.
        crow: ``[rows + 1]`` or ``[batch, rows + 1]``; int32 or int64.
        col: ``[entries]`` or ``[batch, entries]``, of that dtype.
        shape: ``[rows, columns]`` that ``crow`` and ``b`` are held to.
        transpose: as for :func:`spmm`.
        check: as for :func:`spmm`.
    """
    return torch.ops.torchkiln.spmm_csr.default(
        values, b, crow, col, shape=shape, transpose=transpose, check=check
    )


def csr_transpose(crow: Tensor, col: Tensor, columns: int) -> Tensor:
    """The transposed pattern, for the ``transpose`` of :func:`spmm`: int32, in one tensor.

    Its entries are in the order of the rows they come from, which a stable sort gives: nothing
    depends on the run. Its size is ``columns + 1 + 2 * entries``, with the batch of the pattern in
    front if there is one; fewer than ``2**31`` entries in all.

    Args:
        crow: as for :func:`spmm_csr`.
        col: as for :func:`spmm_csr`.
        columns: of the sparse matrix.
    """
    return torch.ops.torchkiln.spmm_transpose.default(crow, col, columns)
