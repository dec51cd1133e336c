"""Inductor makes no copies for the layout of tensors in front of ops that take any strides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import torchkiln
from torchkiln.typing import Activation

COLUMNS = 8
W, V = torch.randn(COLUMNS, COLUMNS), torch.randn(COLUMNS)
ACT: Activation = "gelu"

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "channels_last": lambda x: x.movedim(1, -1),
    "sliced": lambda x: x[:, ::2],
    "computed, then expanded": lambda x: (x[:1] * 2).expand(x.shape),
    "computed, then transposed": lambda x: (x * 2).transpose(0, 2),
    "product, then transposed": lambda x: (x @ W).transpose(0, 2) + 1,
}
"""Views ``[..., 8]`` of ``[8, 8, 8]``: some in memory that Inductor may lay out, some not."""


def labels_of(x: Tensor) -> Tensor:
    return torch.zeros_like(x[..., 0], dtype=torch.int64)


def rows(x: Tensor) -> Tensor:
    """The first matrix, as a view."""
    return x[0]


OPS: dict[str, Callable[[Tensor], Any]] = {
    "rms_norm": lambda x: torchkiln.rms_norm(x, (COLUMNS,), V),
    "layer_norm": lambda x: torchkiln.layer_norm(x, (COLUMNS,), V, V),
    "add_rms_norm": lambda x: torchkiln.add_rms_norm(x, x, (COLUMNS,), V),
    "add_layer_norm": lambda x: torchkiln.add_layer_norm(x, x, (COLUMNS,), V, V),
    "gated_rms_norm": lambda x: torchkiln.gated_rms_norm(x, x, (COLUMNS,), V),
    "softmax": lambda x: torchkiln.softmax(x, -1, causal=True),
    "log_softmax": lambda x: torchkiln.log_softmax(x, 0),
    "linear": lambda x: torchkiln.linear(x, W, V, act=ACT),
    "mlp": lambda x: torchkiln.mlp(x, W, W),
    "gated_mlp": lambda x: torchkiln.gated_mlp(x, torch.cat([W, W]), W),
    "_dropout_add_with_state": lambda x: torchkiln.dropout_add(x, x, 0.0),
    "cross_entropy": lambda x: torchkiln.cross_entropy(rows(x), labels_of(rows(x))),
    "linear_cross_entropy": lambda x: torchkiln.linear_cross_entropy(
        rows(x), W, labels_of(rows(x))
    ),
    "qkv_norm_rope": lambda x: torchkiln.qkv_norm_rope(
        x, torch.ones(x.shape[1], 1), torch.ones(x.shape[1], 1), None, None, 2, 1
    ),
}
"""The ops that Inductor may give any strides, by their names in a graph."""


@pytest.fixture(autouse=True)
def without_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    cached = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._inductor.config.patch(fx_graph_cache=False), cached:
        yield
    torch.compiler.reset()


def test_every_op_with_results_in_one_layout_is_tagged() -> None:
    """Ops whose results or packed bits follow the memory order of an argument are not tagged."""
    tagged = {
        name
        for name in OPS
        if torch.Tag.flexible_layout in getattr(torch.ops.torchkiln, name).default.tags
    }
    assert tagged == OPS.keys()
    for name in ("rope", "bias_act", "bn_act", "group_norm", "relu", "_bn_act_backward"):
        assert torch.Tag.flexible_layout not in getattr(torch.ops.torchkiln, name).default.tags


def leaves(x: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [x] if isinstance(x, Tensor) else list(x)


@pytest.mark.rotates("layout", 3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_copy_in_front_of_an_op(layout: str) -> None:
    """No kernel of Inductor is named after an op, as a copy of its arguments would be."""

    def function(x: Tensor) -> list[Tensor]:
        view = LAYOUTS[layout](x)
        return [y for op in OPS.values() for y in leaves(op(view))]

    x = torch.randn(COLUMNS, COLUMNS, COLUMNS)
    expected = function(x)
    found, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, check_stride=True)
    _, calls = code.split("def call(")
    assert set(re.findall(r"torch\.ops\.torchkiln\.(\w+)", calls)) >= OPS.keys()
    kernels = set(re.findall(r"\w+_fused_\w+", calls))
    assert not [name for name in kernels for op in OPS if op in name]


@pytest.mark.rotates("layout", 2)
@pytest.mark.parametrize("layout", ["channels_last", "computed, then expanded"])
def test_gradients_of_any_layout(layout: str) -> None:
    """Results are read transposed and expanded, so their gradients have these layouts."""

    def function(x: Tensor) -> Tensor:
        view = LAYOUTS[layout](x)
        results = [y for op in OPS.values() for y in leaves(op(view))]
        weights = torch.linspace(1, 2, 8)
        wide = [y for y in results if y.dim() > 1]
        return torch.stack([(y.transpose(0, -1)[:1] * weights[:1]).sum() for y in wide]).sum()

    x = torch.randn(COLUMNS, COLUMNS, COLUMNS, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x), x)
    (found,) = torch.autograd.grad(torch.compile(function, fullgraph=True)(x), x)
    torch.testing.assert_close(found, expected)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: torchkiln.layer_norm(x, (COLUMNS,), V, V),
    "add_rms_norm": lambda x: torchkiln.add_rms_norm(x, x * 2, (COLUMNS,), V)[0],
    "gated_rms_norm": lambda x: torchkiln.gated_rms_norm(x, x * 2, (COLUMNS,), V),
}
"""The ops that save numbers for each row, in a tensor with as many dimensions as ``x``."""


@pytest.mark.parametrize("name", BETWEEN)
def test_gradients_of_channels_between_convolutions(name: str) -> None:
    """There Inductor lays out all tensors of 4 dimensions for channels, saved ones included."""
    first, last = torch.nn.Conv2d(3, COLUMNS, 3), torch.nn.Conv2d(COLUMNS, 4, 2)
    parameters = [*first.parameters(), *last.parameters()]

    def function(x: Tensor) -> Tensor:
        normed = BETWEEN[name](first(x).movedim(1, -1))
        found: Tensor = last(normed.movedim(-1, 1)).square().mean()
        return found

    x = torch.randn(2, 3, 6, 5)
    expected = torch.autograd.grad(function(x), parameters)
    compiled: Any = torch.compile(function, fullgraph=True)
    found = torch.autograd.grad(compiled(x), parameters)
    torch.testing.assert_close(found, expected)
