"""The choice of torchkiln's ops in a graph for Inductor, by a table of measured times.

``torchkiln bench --compile FILE`` writes such a table. The table in this folder was measured on an
H100. Ops without times in a table are left to torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torchkiln.patch.formula import activation, gated_plan
from torchkiln.patch.table import SCHEMA, SHIPPED, Timed, given_table, rows_of

OPS = (
    *("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", *gated_plan.OPS, *activation.OPS),
    *("linear", "padded_linear", "rope", "cross_entropy", "linear_cross_entropy"),
)
"""The ops that a graph can get; ``padded_linear`` is ``linear`` with sizes that it pads."""

MODULE_OPS = ("dropout_add", "group_norm", "softmax", "log_softmax")
"""Further ops that modules of ``replace`` call."""


def table_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a run of ``torchkiln bench``, from large calls of the ops that models use.

    ValueError if no such call has times of ``torch.compile``, forward and backward.
    """
    known = (*OPS, *MODULE_OPS)
    found: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for row in record["rows"]:
        times = row["times"]
        op = "_".join(filter(None, (row.get("variant"), row["op"])))
        if row["kind"] == "calls" and op in known and "compile" in times:
            of_op = found.setdefault((op, row["dtype"], row["shape"][1]), {})
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
            f"{', '.join(known)} beside torch.compile, expected some; leave out --peers, "
            "--direction and kinds of calls, and name none but these ops"
        )
    return {"schema": SCHEMA, "environment": record["environment"], "rows": rows}


def timed(file: Path, op: str, x: Tensor) -> Timed | None:
    """Times of an op, or of one with the same kernels, at the row length nearest to that of x."""
    rows, columns = rows_of(file, op, x.dtype), columns_of(x)
    nearest = (abs(math.log((row.columns + 1) / (columns + 1))) for row in rows)
    return min(zip(nearest, rows, strict=True), default=(0.0, None))[1]


def columns_of(x: Tensor) -> int:
    """The last size."""
    return hint_of(x.shape[-1] if x.dim() else 1)


def hint_of(size: Any) -> int:
    """A size as a number. For a symbol it is that of the example, and no guard is added."""
    node = getattr(size, "node", None)
    return int(size) if node is None else int(node.hint or 1)


class Choice:
    """Chooses between torchkiln's op and torch's for a tensor: by ``ours``, or else by a table."""

    def __init__(self, *, ours: Collection[str] | None = None, table: Path | None = None) -> None:
        self.ours, self.table = ours, table

    def __call__(self, op: str, x: Tensor) -> bool:
        """Whether to use an op for tensors like ``x``, its input or the logits."""
        if self.ours is not None:
            return op in self.ours
        table = self.table or given_table()
        if table is None and x.device.type != "cuda":
            return False
        found = timed(table or SHIPPED, op, x)
        return found is not None and found.is_ours


def note(op: str, tensors: Iterable[Tensor]) -> str:
    """The choice for a call as a sentence; empty if the shipped table has no times for it."""
    x = next((t for t in tensors if t.is_floating_point() and t.dim()), None)
    if x is None or x.device.type != "cuda":
        return ""
    found = timed(SHIPPED, op, x) if op in OPS else None
    if found is None:
        return ""
    chosen = "this op" if found.is_ours else "torch's ops"
    other = "" if found.op == op else f" in {found.op}, which has the same kernels,"
    return (
        f'torch.compile(backend="torchkiln") chooses {chosen}: on an H100, rows of '
        f"{found.columns}{other} took {found.ours * 1e6:.4g} us, and "
        f"{found.compiled * 1e6:.4g} us compiled by Inductor"
    )
