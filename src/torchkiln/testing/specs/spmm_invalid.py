"""What sparse products refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchkiln.testing.spec import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Every refusal but those of a pattern that is looked at on request."""
    values = torch.ones(3, device=device)
    b = torch.ones(4, 2, device=device)
    pattern = {
        "crow": torch.tensor([0, 2, 3], device=device),
        "col": torch.tensor([0, 3, 1], device=device),
    }

    def case(
        title: str,
        message: str,
        error: type[Exception] = RuntimeError,
        v: object = values,
        dense: object = b,
        **kwargs: Any,
    ) -> Invalid:
        prefix = r"torchkiln\.spmm: "
        return Invalid(title, (v, dense), error, prefix + message, {**pattern, **kwargs})

    tensor = r"got NoneType, expected a torch\.Tensor"
    yield case("None for b", "b: " + tensor, TypeError, dense=None)
    yield case("None for values", "values: " + tensor, TypeError, v=None)
    floating = "expected one of float32, float64, float16, bfloat16"
    for dtype in (torch.int64, torch.bool, torch.complex64):
        said = str(dtype).removeprefix("torch.")
        yield case(f"{said} values", f"values: got dtype {said}, {floating}", v=values.to(dtype))
    yield case(
        "dtypes that differ",
        "b: got dtype float64, expected float32, the dtype of values",
        dense=b.double(),
    )
    yield case(
        "b on another device",
        r"b: got device meta, expected \S+, the device of crow",
        dense=b.to("meta"),
    )
    yield case(
        "sparse b",
        r"b: got layout Sparse, expected Strided; call \.to_dense\(\) first",
        dense=b.to_sparse(),
    )
    yield case(
        "too many values",
        r"values: got size 4 in dimension 0 of shape \[4\], expected 3, the number of entries in "
        "col",
        v=torch.ones(4, device=device),
    )
    yield case(
        "values of rank 3",
        r"values: got shape \[1, 1, 3\], expected \[entries\] or \[batch, entries\]",
        v=values.reshape(1, 1, 3),
    )
    yield case(
        "b is a vector",
        r"b: got shape \[4\], expected a matrix or a batch of matrices",
        dense=b[:, 0],
    )
    yield case(
        "batches that differ",
        r"b: got a batch of 3 in shape \[3, 4, 2\], expected 2, that of values, or no batch",
        v=values.expand(2, 3),
        dense=b.expand(3, 4, 2),
    )
    yield case(
        "rows of another shape",
        r"crow: got size 3 in dimension 0 of shape \[3\], expected 6, one more than the rows of "
        "the shape",
        shape=(5, 4),
    )
    yield case(
        "shapes that do not multiply",
        r"b: got size 4 in dimension 0 of shape \[4, 2\], expected 7, the columns of the sparse "
        "matrix",
        shape=(2, 7),
    )
    yield case("shape of rank 1", r"shape: got \[4\], expected \[rows, columns\]", shape=(4,))
    yield case(
        "float crow",
        "crow: got dtype float32, expected int32 or int64",
        crow=pattern["crow"].float(),
    )
    yield case(
        "indices that differ",
        "col: got dtype int32, expected int64, the dtype of crow",
        col=pattern["col"].int(),
    )
    yield case(
        "no end",
        r"crow: got shape \[0\], expected at least one element, the end of the last row",
        crow=pattern["crow"][:0],
    )
    yield case(
        "col of another rank",
        r"col: got shape \[1, 3\], expected \[entries\], as crow has no batch",
        col=pattern["col"].reshape(1, 3),
    )
    yield case(
        "another transposed pattern",
        r"transpose: got int64 \[3\], expected what torchkiln\.csr_transpose\(\) made of the "
        "pattern",
        transpose=pattern["crow"],
    )
    yield case(
        "transposed pattern of other columns",
        "transpose: got that of a pattern with 5 columns, expected 4",
        transpose=torch.zeros(12, dtype=torch.int32, device=device),
    )
