"""Which ops stay torchkiln's in a graph for Inductor: a table of measured times.

``torchkiln bench --compile FILE`` writes such a table. The table in this folder was measured on an
H100. An op that a table does not have stays torch's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from torchkiln.ops._traced import name_of
from torchkiln.patch.formula import activation, gated

OPS = (
    *("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", *gated.OPS, *activation.OPS),
    *("linear", "rope", "cross_entropy", "linear_cross_entropy"),
)
"""The ops that a graph can get."""

SCHEMA = "torchkiln.compile/1"

SHIPPED = Path(__file__).with_name("h100.json")

LEAST_GAIN = 1.05
"""An op is used if Inductor's code takes this multiple of its time, forward and backward."""

SAME_KERNELS = {
    "rms_norm": "add_rms_norm",
    "layer_norm": "add_layer_norm",
    "linear_cross_entropy": "cross_entropy",
}
"""Ops that run the kernels of another op, whose times a table may have instead."""


class Timed(NamedTuple):
    """Seconds of forward and backward for rows of one length."""

    columns: int
    ours: float
    compiled: float

    @property
    def is_ours(self) -> bool:
        """Whether the op is faster than Inductor's code."""
        return self.compiled >= LEAST_GAIN * self.ours


Table = Mapping[tuple[str, str], list[Timed]]
"""The times by op and dtype."""


def table_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a run of ``torchkiln bench``, from its large calls of ops in ``OPS``.

    ValueError if the run has none beside ``torch.compile``, forward and backward.
    """
    found: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for row in record["rows"]:
        times = row["times"]
        is_large = row["kind"] == "calls" and not row.get("variant")
        if is_large and row["op"] in OPS and "compile" in times:
            of_op = found.setdefault((row["op"], row["dtype"], row["shape"][1]), {})
            of_op[row["direction"]] = [times[name]["seconds"] for name in ("torchkiln", "compile")]
    rows = []
    for (op, dtype, columns), times in sorted(found.items()):
        if times.keys() == {"forward", "backward"}:
            ours, compiled = (sum(pair) for pair in zip(*times.values(), strict=True))
            row = {"op": op, "dtype": dtype, "columns": columns}
            rows.append(
                row | {"torchkiln": float(f"{ours:.4g}"), "compile": float(f"{compiled:.4g}")}
            )
    if not rows:
        raise ValueError(
            "torchkiln.bench: --compile: got a run without large calls, forward and backward, of "
            f"{', '.join(OPS)} beside torch.compile, expected some; leave out --peers, --direction "
            "and kinds of calls, and name none but these ops"
        )
    return {"schema": SCHEMA, "environment": record["environment"], "rows": rows}


@cache
def read(path: Path) -> Table:
    """The table in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r}")
        table: dict[tuple[str, str], list[Timed]] = {}
        for row in content["rows"]:
            timed = Timed(row["columns"], row["torchkiln"], row["compile"])
            table.setdefault((row["op"], row["dtype"]), []).append(timed)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"torchkiln.compile: table: got {path} ({type(error).__name__}: {error}), expected a "
            "file that `torchkiln bench --compile` wrote"
        ) from error
    return table


def timed(file: Path, op: str, x: Tensor) -> Timed | None:
    """The times of an op for the row length nearest to that of ``x``; None for no times."""
    table, dtype, columns = read(file), name_of(x.dtype), columns_of(x)
    rows = table.get((op, dtype)) or table.get((SAME_KERNELS.get(op, ""), dtype)) or ()
    nearest = (abs(math.log((row.columns + 1) / (columns + 1))) for row in rows)
    return min(zip(nearest, rows, strict=True), default=(0.0, None))[1]


def columns_of(x: Tensor) -> int:
    """The last size; the size of the example if it is a symbol, which gets no guard."""
    size: Any = x.shape[-1] if x.dim() else 1
    node = getattr(size, "node", None)
    return int(size) if node is None else int(node.hint or 1)


class Choice:
    """Whether an op is torchkiln's for a tensor: one of ``ours``, or else by a table."""

    def __init__(self, *, ours: Collection[str] | None = None, table: Path | None = None) -> None:
        self.ours, self.table = ours, table

    def __call__(self, op: str, x: Tensor) -> bool:
        """Whether to use an op for tensors like ``x``, its input or the logits."""
        if self.ours is not None:
            return op in self.ours
        if self.table is None and x.device.type != "cuda":
            return False
        found = timed(self.table or SHIPPED, op, x)
        return found is not None and found.is_ours


def note(op: str, tensors: Iterable[Tensor]) -> str:
    """The choice for a call as a sentence; empty if the shipped table has no times for it."""
    x = next((t for t in tensors if t.is_floating_point() and t.dim()), None)
    if x is None or x.device.type != "cuda":
        return ""
    found = timed(SHIPPED, op, x)
    if found is None:
        return ""
    chosen = "this op" if found.is_ours else "torch's ops"
    return (
        f'torch.compile(backend="torchkiln") chooses {chosen}: on an H100, rows of '
        f"{found.columns} took {found.ours * 1e6:.4g} us, and {found.compiled * 1e6:.4g} us "
        "compiled by Inductor"
    )
