"""``torchkiln.replace``, then ``torch.compile``: rotary position embeddings in the graph."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rotations
import torch
from rotations import as_llama
from test_replace_rope import (
    Added,
    Angles,
    Attention,
    InFront,
    Squared,
    Viewed,
    as_rotated_keys,
    batch,
    change_result,
    made,
)
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import torchkiln
from torchkiln.patch.table import SCHEMA, VARIABLE


@pytest.fixture(autouse=True)
def without_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def changed(x: Tensor) -> Tensor:
    return x.mul_(torch.arange(x.shape[-1]))


CHANGED_OUTSIDE: Any = torch.compiler.disable(changed)
"""Changes a tensor where Dynamo does not see it."""


class Broken(Attention):
    """A graph ends between the angles and the rotation."""

    def change(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


class ChangedOutside(Attention):
    def change(self, x: Tensor) -> Tensor:
        found: Tensor = CHANGED_OUTSIDE(x)
        return found


class ChangedView(Attention):
    def change(self, x: Tensor) -> Tensor:
        x.view(-1)[0] = 7
        return x


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        q, k = as_llama(q, k, cos, sin)
        return torch.cat([q.mT.flatten(1), k.mT.flatten(1)], -1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.angles, self.scores = Angles(), Scores()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.scores, x, *self.angles(x), use_reentrant=False)
        return y


class Learned(Angles):
    """Angles with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = self.frequencies
        del self.frequencies
        self.frequencies = nn.Parameter(frequencies)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        freqs = torch.arange(x.shape[1])[None, :, None] * self.frequencies
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def step(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """The result of a model and its gradients."""
    y = model(x)
    return y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))


def compared(
    make: Callable[..., nn.Module], *args: Any, fullgraph: bool = True, **options: Any
) -> int:
    """The calls of the op in a compiled model, which computes what the original does."""
    x = batch(torch.float64)
    expected = step(made(make, *args).double(), x)
    model = made(make, *args).double()
    assert torchkiln.replace(model, only="rope").changed
    found: list[Any] = []

    def kept(graph: fx.GraphModule, _: Any) -> Any:
        parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
        found.extend(node.target for part in parts for node in part.graph.nodes)
        return graph.forward

    compiled: Any = torch.compile(model, backend=kept, fullgraph=fullgraph, **options)
    torch.testing.assert_close(step(compiled, x), expected)
    return found.count(torch.ops.torchkiln.rope.default)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", [Attention, InFront, Checkpointed])
def test_the_op_stays_in_the_graph(make: type[nn.Module], dynamic: bool) -> None:
    assert compared(make, dynamic=dynamic) == 1


@pytest.mark.parametrize("make", [Squared, Added, Viewed, ChangedView])
def test_other_tensors_than_those_of_the_module_run_as_before(make: type[nn.Module]) -> None:
    assert compared(make) == 0


@pytest.mark.parametrize("make", [Broken, ChangedOutside])
def test_tensors_of_another_graph_run_as_before(make: type[nn.Module]) -> None:
    """They keep the attribute by which a trace knows them."""
    assert compared(make, fullgraph=False) == 0


def test_angles_with_a_gradient_run_as_before() -> None:
    """The op reads only one of two equal columns."""
    assert compared(lambda: Attention(Learned())) == 0


def test_hooks_and_inference_mode() -> None:
    model, other, x = made(Attention), made(Attention), batch()
    torchkiln.replace(model, only="rope")
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), other(x))
    for one in (model, other):
        one.angles.register_forward_hook(change_result)
    torch.testing.assert_close(compiled(x), other(x))


def test_a_changed_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, x = made(Attention), made(Attention), batch()
    torchkiln.replace(model, only="rope")
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), other(x))
    of_model = vars(rotations), "rotate_half", torch.neg
    of_call = Attention.forward.__globals__, "as_llama", as_rotated_keys
    for place, name, function in (of_model, of_call):
        with monkeypatch.context() as patch:
            patch.setitem(place, name, function)
            torch.testing.assert_close(compiled(x), other(x))
        torch.testing.assert_close(compiled(x), other(x))


@pytest.mark.parametrize("gain", [1.2, 1.0])
def test_the_table_decides(gain: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"op": "rope", "dtype": "float64", "columns": 1024, "torchkiln": 1.0, "compile": gain}
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"schema": SCHEMA, "rows": [row]}))
    monkeypatch.setenv(VARIABLE, str(file))
    assert compared(Attention) == (gain > 1.1)


def test_inductor_makes_no_code_of_the_search() -> None:
    model, x = made(Attention), batch()
    expected = step(model, x)
    torchkiln.replace(model, only="rope")
    compiled: Any = torch.compile(model, fullgraph=True)
    found, codes = run_and_get_code(lambda: step(compiled, x))
    torch.testing.assert_close(found, expected)
    assert "torchkiln.rope." in codes[0]
    assert "_changes" not in "".join(codes)
