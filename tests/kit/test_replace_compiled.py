"""Replaced models under ``torch.compile``: no graph more than the originals have."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from model_times import DEFAULT_ROWS
from timed_models import MODELS, loss_of
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional as F

import torchkiln

CPU = torch.device("cpu")
ROWS = DEFAULT_ROWS["models"].split(",")[:-1]
"""The models of transformers in docs/model_times.py; the last row is a model of our own."""

Given = dict[str, Tensor]


@pytest.fixture(autouse=True)
def without_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def cast(given: Given, dtype: torch.dtype) -> Given:
    """The arguments of a call, with floating-point tensors of this dtype."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}


def step(call: Callable[..., Any], model: nn.Module, given: Given) -> Tensor:
    """The loss, and the gradients of all trained parameters, as one vector."""
    loss = loss_of(call(**given))
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
    return torch.cat([loss.detach()[None], *(x.flatten() for x in found)])


def compiled_step(model: nn.Module, given: Given, *, fullgraph: bool) -> tuple[Tensor, int]:
    """A step under ``torch.compile``, and the number of its graphs."""
    torch.compiler.reset()
    counters.clear()
    kept = CompileCounterWithBackend("aot_eager")
    found = step(torch.compile(model, backend=kept, fullgraph=fullgraph), model, given)
    return found, kept.frame_count


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.rotates("name", 3)
@pytest.mark.parametrize("name", ROWS)
def test_a_replaced_model_has_no_more_graphs(name: str) -> None:
    model = MODELS[name].build(CPU, tiny=True).float()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    given = cast(MODELS[name].inputs(CPU, tiny=True), torch.float32)
    truth = step(wide := copy.deepcopy(model).double(), wide, cast(given, torch.float64))
    was, graphs = compiled_step(model, given, fullgraph=False)
    fullgraph = not counters["graph_break"]
    assert torchkiln.replace(model).changed
    now, found = compiled_step(model, given, fullgraph=fullgraph)
    assert found <= graphs
    assert error(now, truth) <= 2 * error(was, truth) + torch.finfo(torch.float32).eps


class Gate(nn.Module):
    """A gated unit whose activation is a function with arguments."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.gate, self.up = nn.Linear(16, 24), nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return result


class WideGate(Gate):
    """A gated unit that reads the dtype of a weight, as T5's does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.gate(x)) * self.up(x)
        if x.dtype != self.down.weight.dtype:
            x = x.to(self.down.weight.dtype)
        result: Tensor = self.down(x)
        return result


GATES: dict[str, Callable[[], nn.Module]] = {
    "function": lambda: Gate(F.silu),
    "partial of a function of torch": lambda: Gate(functools.partial(F.gelu, approximate="tanh")),
    "partial of a function": lambda: Gate(functools.partial(F.silu, inplace=False)),
    "dtype of a weight": lambda: WideGate(F.silu),
}


@pytest.mark.parametrize("name", GATES)
def test_conditions_of_a_gated_unit_are_traced(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(GATES[name](), GATES[name]())
    x = torch.randn(3, 16)
    expected = model(x)
    assert [row.kind for row in torchkiln.replace(model, only=["glu"]).changed] == ["glu", "glu"]
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_a_compiled_gate_follows_its_function() -> None:
    """Dynamo guards on the conditions that the trace has read."""
    torch.manual_seed(0)
    model: Any = Gate(functools.partial(F.gelu, approximate="tanh"))
    x = torch.randn(3, 16)
    torchkiln.replace(model)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for act in (
        functools.partial(F.gelu, approximate="tanh"),
        functools.partial(F.gelu, approximate="none"),
        functools.partial(F.leaky_relu, negative_slope=0.5),
        functools.partial(F.gelu, approximate="tanh"),
    ):
        model.act = act
        expected = model.down(act(model.gate(x)) * model.up(x))
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(model(x), expected)
