"""``torchkiln.replace``, then ``torch.compile``: a table of measured times selects the ops."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import torchkiln
from torchkiln.patch.table import SCHEMA, VARIABLE

COLUMNS = 32


class Model(nn.Module):
    """A sum before a norm, a layer before an activation, a softmax and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.LayerNorm(COLUMNS), nn.RMSNorm(COLUMNS)
        self.up, self.act = nn.Linear(COLUMNS, 64), nn.ReLU()
        self.down = nn.Linear(64, COLUMNS)
        self.softmax, self.gelu = nn.Softmax(-1), nn.GELU()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        residual = self.first(x)
        x = residual + self.gelu(x)
        y = self.norm(x)
        y = self.up(y)
        y = self.act(y)
        y = self.softmax(self.down(y))
        return F.cross_entropy(y, target)


class Dropped(nn.Module):
    """A dropout before a sum and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(COLUMNS), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x) + x
        return self.norm(x)


OURS = {"layer_norm", "add_rms_norm", "linear", "softmax", "cross_entropy"}
"""Ops of the replaced model that a graph without a table contains."""


@pytest.fixture(autouse=True)
def without_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes a table with the speed-up of each op by length of rows, and sets its path."""

    def write(**gains: dict[int, float]) -> None:
        rows = [
            {"op": op, "dtype": "float32", "columns": columns, "torchkiln": 1.0, "compile": gain}
            for op, of_op in gains.items()
            for columns, gain in of_op.items()
        ]
        file = tmp_path / "table.json"
        file.write_text(json.dumps({"schema": SCHEMA, "rows": rows}))
        monkeypatch.setenv(VARIABLE, str(file))

    return write


def ops_of(model: nn.Module, *args: Tensor, dynamic: bool = False) -> set[str]:
    """Compares the results; returns the names of our ops in the graph that Dynamo records."""
    found: list[fx.GraphModule] = []

    def kept(graph: fx.GraphModule, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=kept, fullgraph=True, dynamic=dynamic)
    if model.training:
        compiled(*args)
    else:
        torch.testing.assert_close(compiled(*args), model(*args))
    (graph,) = found
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    ours = (name.removeprefix("torchkiln.") for name in names if name.startswith("torchkiln."))
    return {name.partition(".")[0] for name in ours}


def made() -> tuple[nn.Module, Tensor, Tensor]:
    """A replaced model and its arguments."""
    torch.manual_seed(0)
    model = Model().eval()
    torchkiln.replace(model)
    return model, torch.randn(8, COLUMNS), torch.arange(8)


def test_ops_without_times_stay() -> None:
    assert ops_of(*made()) == OURS


@pytest.mark.parametrize("op", ["", *sorted(OURS)])
def test_ops_that_are_slower_become_those_of_torch(op: str, use: Callable[..., None]) -> None:
    """Ops that the table has as slower are torch's in the graph: all, or all but one."""
    of_kernels = {"layer_norm": "add_layer_norm"}
    gains = {of_kernels.get(name, name): {COLUMNS: 1.1 if name == op else 1.0} for name in OURS}
    use(**gains)
    assert ops_of(*made()) == ({op} if op else set())


def test_a_norm_without_its_sum(use: Callable[..., None]) -> None:
    use(add_rms_norm={COLUMNS: 1.0}, rms_norm={COLUMNS: 2.0})
    assert ops_of(*made()) == OURS - {"add_rms_norm"} | {"rms_norm"}


def test_the_nearest_length_decides(use: Callable[..., None]) -> None:
    """The row of the table with the nearest length decides, for dynamic sizes through a guard."""
    use(softmax={8: 2.0, 128: 0.5})
    model = nn.Sequential(nn.Softmax(-1))
    torchkiln.replace(model)
    for columns, expected in ((2, {"softmax"}), (33, {"softmax"}), (34, set()), (4000, set())):
        for dynamic in (False, True):
            torch.compiler.reset()
            assert ops_of(model, torch.randn(3, columns), dynamic=dynamic) == expected


def test_a_dropout_is_ours_where_it_was_measured(use: Callable[..., None]) -> None:
    model = Dropped()
    torchkiln.replace(model)
    x = torch.randn(4, COLUMNS)
    assert ops_of(model, x) == {"add_layer_norm"}  # Inductor fuses dropout and sum
    torch.compiler.reset()
    use(dropout_add={COLUMNS: 3.0})
    assert ops_of(model, x) == {"layer_norm", "_dropout_state", "_dropout_add_with_state"}


def test_a_table_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(Exception, match=r"torchkiln\.compile: table: got .*none\.json") as found:
        ops_of(*made())
    assert "expected a file that `torchkiln bench --compile` wrote" in str(found.value)
