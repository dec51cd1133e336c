"""Wide linear layers in compiled graphs: by the backend, by ``replace``, and by Inductor alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_compiled_graphs import checked
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

import torchkiln
from torchkiln.patch.compiled.backend import backend
from torchkiln.patch.table import SCHEMA, VARIABLE

WIDE = 1 << 11
"""Rows of 512 elements that have a million elements together."""


@pytest.fixture(autouse=True)
def without_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def with_bias(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w, w[:, 0].sin())


def returned_logits(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w)
    return F.cross_entropy(y, torch.arange(x.shape[0]) % 9), y


LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, int, int], str]] = {
    "padded": (F.linear, (6, 512, 513), "1 padded_linear"),
    "padded inputs": (F.linear, (6, 516, 512), "1 padded_linear"),
    "padded, with a bias": (with_bias, (6, 512, 513), "1 padded_linear"),
    "a head with its loss": (returned_logits, (6, 512, 513), "1 cross_entropy, 1 padded_linear"),
    "aligned": (F.linear, (6, 512, 512), "no op found"),
    "small": (F.linear, (6, 500, 513), "no op found"),
    "many rows": (with_bias, (WIDE, 512, 512), "1 linear"),
    "few rows": (with_bias, (WIDE - 1, 512, 512), "no op found"),
    "bias without a gradient": (
        lambda x, w: F.linear(x, w, w[:, 0].detach()),
        (WIDE, 512, 512),
        "no op found",
    ),
    "transposed": (lambda x, w: F.linear(x.t(), w).t(), (512, 6, 513), "1 padded_linear"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(caplog: pytest.LogCaptureFixture, name: str) -> None:
    function, (rows, columns, outputs), ops = LAYERS[name]
    x = torch.randn(rows, columns, dtype=torch.float64)
    w = torch.randn(outputs, x.shape[0] if name == "transposed" else columns, dtype=torch.float64)
    assert checked(caplog, function, x, w / 16) == ops


def test_layers_of_another_length_need_no_new_graph(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchkiln.compile")
    w = torch.randn(513, 512, requires_grad=True)
    compiled = torch.compile(with_bias, backend=backend, options={"then": "eager"}, dynamic=True)
    for rows in (3, WIDE, 5):
        x = torch.randn(rows, 512)
        torch.testing.assert_close(compiled(x, w), with_bias(x, w), rtol=1e-4, atol=1e-4)
    assert [record.getMessage() for record in caplog.records] == ["1 padded_linear"]


class Heads(nn.Module):
    """A layer whose sizes the op pads, and one with a large gradient of its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(512, 512), nn.Linear(512, 513, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.up(x))
        return y


@pytest.mark.parametrize(
    "gains", [{}, {"linear": 1.0, "padded_linear": 1.2}, {"linear": 1.2}], ids=str
)
def test_replaced_layers_follow_a_table(
    gains: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"dtype": "float32", "columns": 512, "torchkiln": 1.0}
    rows = [row | {"op": op, "compile": gain} for op, gain in gains.items()]
    (tmp_path / "table.json").write_text(json.dumps({"schema": SCHEMA, "rows": rows}))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "table.json"))
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(WIDE, 512)
    expected = model(x)
    torchkiln.replace(model, only="linear")
    found: list[Any] = []

    def kept(graph: fx.GraphModule, _: Any) -> Any:
        found.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    compiled: Any = torch.compile(model, backend=kept, fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    count = found.count(torch.ops.torchkiln.linear.default)
    assert count == sum(gain > 1.1 for gain in gains.values())


def test_inductor_adds_gradients_of_a_shared_input_in_products() -> None:
    """As the backward of ``replace`` does in eager mode."""
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    x = torch.randn(8, 16, requires_grad=True)

    def outputs(x: Tensor) -> Tensor:
        x = x * 2
        return torch.stack([layer(x) for layer in layers])

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(function(x).sin().sum(), x)[0]

    compiled: Any = torch.compile(outputs, fullgraph=True)
    found, codes = run_and_get_code(lambda: gradient(compiled))
    torch.testing.assert_close(found, gradient(outputs))
    assert codes[-1].count("extern_kernels.addmm(") == 2
