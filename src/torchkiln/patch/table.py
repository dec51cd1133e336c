"""Measured times of ops and of Inductor's code, by which modules of ``replace`` choose ops.

``torchkiln bench --compile FILE`` writes such a table. The table in :mod:`torchkiln.patch.compiled`
was measured on an H100.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchkiln.ops._traced import name_of

SCHEMA = "torchkiln.compile/1"

SHIPPED = Path(__file__).with_name("compiled") / "h100.json"

VARIABLE = "TORCHKILN_COMPILE_TABLE"
"""The environment variable with the path of another table."""

LEAST_GAIN = 1.05
"""An op is used if Inductor's code takes at least this multiple of its time, in both directions."""

SAME_KERNELS = {
    "rms_norm": "add_rms_norm",
    "layer_norm": "add_layer_norm",
    "linear_cross_entropy": "cross_entropy",
}
"""Ops that run the kernels of another op, whose times a table may have instead."""


class Timed(NamedTuple):
    """Seconds of forward and backward of an op for rows of one length."""

    op: str
    columns: int
    ours: float
    compiled: float

    @property
    def is_ours(self) -> bool:
        """Whether Inductor's code takes at least ``LEAST_GAIN`` times as long as the op."""
        return self.compiled >= LEAST_GAIN * self.ours


Table = Mapping[tuple[str, str], list[Timed]]
"""The times by op and dtype."""


@cache
def read(path: Path) -> Table:
    """The table of times in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r}")
        table: dict[tuple[str, str], list[Timed]] = {}
        for row in content["rows"]:
            timed = Timed(row["op"], row["columns"], row["torchkiln"], row["compile"])
            table.setdefault((row["op"], row["dtype"]), []).append(timed)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"torchkiln.compile: table: got {path} ({type(error).__name__}: {error}), expected a "
            "file that `torchkiln bench --compile` wrote"
        ) from error
    return table


def rows_of(file: Path, op: str, dtype: torch.dtype) -> list[Timed]:
    """The times of an op in a file, by the length of the rows."""
    table, name = read(file), name_of(dtype)
    rows = table.get((op, name)) or table.get((SAME_KERNELS.get(op, ""), name)) or []
    return sorted(rows)


def given_table() -> Path | None:
    """The table that the user has named for the process."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None


def limits(op: str, dtype: torch.dtype, device: str) -> tuple[tuple[float, bool], ...]:
    """Upper limits of row lengths, one per measured length, with whether the op is chosen below.

    A length gets the choice of the measured length whose logarithm is nearest. Comparisons with
    limits make at most two guards of a symbolic size.
    """
    file = given_table()
    if file is None and device != "cuda":
        return ()  # the shipped table has no times of other devices
    rows = rows_of(file or SHIPPED, op, dtype)
    between = [math.sqrt((a.columns + 1) * (b.columns + 1)) - 1 for a, b in pairwise(rows)]
    ends = [*map(math.floor, between), math.inf]
    return tuple((end, row.is_ours) for end, row in zip(ends, rows, strict=False))


# The mark that torch.compiler.assume_constant_result sets. That function is not called, because it
# imports the compiler, which takes 3 s.
limits._dynamo_marked_constant = True  # type: ignore[attr-defined]


def stays(op: str, x: Any = None, *_: Any, dim: int = -1) -> bool:
    """Whether a module calls an op: yes, unless it was measured to be slower for ``x``.

    ``dim`` is the dimension whose size is the length of a row: for a loss, the classes.
    """
    is_row = isinstance(x, Tensor) and x.dim() > max(dim, 0)
    return not is_row or is_chosen(op, x, x.shape[dim], unmeasured=True)


def is_chosen(op: str, x: Tensor, columns: Any, *, unmeasured: bool) -> bool:
    """Whether a module of ``replace`` calls an op while ``torch.compile`` records it.

    ``unmeasured`` is the result for ops, dtypes and devices without times. Dynamo runs this
    function.
    """
    # Imported here, because it imports sympy: at the top of the file it would add half a second to
    # the import of torchkiln.
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # noqa: PLC0415

    for end, is_ours in limits(op, x.dtype, x.device.type):
        if guard_or_false(columns <= end):  # false for a size that depends on data
            return is_ours
    return unmeasured
