"""``torchkiln.replace(model, precision="fp8")``: norms that write E4M3 for the layers behind them.

A norm does so only if nothing else reads its result. Each module below that reads the result in
another way must get a tensor.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchkiln
from torchkiln.patch import fed, fp8

SIZE, TOKENS = 512, 20


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allows FP8 on the CPU, for layers that are faster from 31 rows on."""
    monkeypatch.setattr(fp8, "missing", lambda *_: "")
    monkeypatch.setattr(fp8, "LEAST", 27)
    monkeypatch.setattr("torchkiln.nn.quantize.has_group", lambda: False)  # another test's group
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """Attention whose projections all read the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(SIZE, SIZE, bias=False) for _ in "qkv")
        self.o_proj = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, hidden_states: Tensor, scale: float = 0.1, **_: Any) -> tuple[Tensor, Any]:
        shape = (*hidden_states.shape[:-1], 4, -1)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2)), None


class Feed(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(SIZE, 2 * SIZE, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Layer(nn.Module):
    """A decoder layer, as in Hugging Face's models."""

    attention: type[nn.Module] = Attention

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(SIZE), nn.LayerNorm(SIZE)
        self.attn, self.mlp = self.attention(), Feed()

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.first(hidden_states)
        hidden_states, _ = self.attn(hidden_states=hidden_states, scale=0.1)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.second(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class InlineLayer(Layer):
    """The forward of ``Layer`` without variables."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.first(x), 0.1)[0]
        return x + self.mlp(self.second(x))


class DeadLayer(Layer):
    """Each norm has its own variable, which only one call reads."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        mixed, _ = self.attn(normed, scale=0.1)
        x = x + mixed
        again = self.second(x)
        y: Tensor = x + self.mlp(again)
        return y


class PairLayer(Layer):
    """A norm before a module with two products of the same input, and a norm before one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = torchkiln.nn.GatedMLP(SIZE, SIZE)  # type: ignore[assignment]
        self.attn = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.first(x))
        y: Tensor = x + self.mlp(self.second(x))
        return y


def passing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that reads the arguments."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **options: Any) -> Any:
        assert isinstance(options.get("hidden_states", args and args[0]), Tensor)
        return function(self, *args, **options)

    return wrapper


class DecoratedAttention(Attention):
    """An attention whose decorator reads the argument."""

    forward = passing(Attention.forward)


class ReadingAttention(Attention):
    """An attention that adds its argument to its result."""

    def forward(self, hidden_states: Tensor, scale: float = 0.1, **_: Any) -> tuple[Tensor, Any]:
        q = self.q_proj(hidden_states)
        v = self.v_proj(hidden_states)
        return self.o_proj(v + q) + scale * hidden_states, None


class OwnAttention(Attention):
    """An attention that passes its argument to a method, too."""

    def forward(self, hidden_states: Tensor, scale: float = 0.1, **_: Any) -> tuple[Tensor, Any]:
        q = self.q_proj(hidden_states)
        v = self.v_proj(hidden_states)
        return self.o_proj(v + q) + scale * self.own(hidden_states), None

    def own(self, x: Tensor) -> Tensor:
        return x.square()


class LateLayer(Layer):
    """The results of the norms are read again after the calls."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        mixed, _ = self.attn(normed, scale=0.1)
        x = x + mixed + normed
        for _ in range(2):
            again = self.second(x)
            mixed = self.mlp(again)
            x = again + mixed
        return x


class TwiceLayer(Layer):
    """A result is passed twice, and another one is returned if an exception is raised."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        mixed, _ = self.attn(normed, extra=normed)
        try:
            again = self.second(x + mixed)
            y: Tensor = self.mlp(again)
        except ZeroDivisionError:
            return again
        return y


class SeenLayer(Layer):
    """A layer that reads all variables by locals()."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        y: Tensor = self.mlp(normed)
        return y + sum(value.sum() for value in locals().values() if isinstance(value, Tensor))


def of(attention: type[nn.Module]) -> type[Layer]:
    """A layer with this class of attention."""
    return type("Of" + attention.__name__, (Layer,), {"attention": attention})


class Count(TorchDispatchMode):
    """Counts the calls of torchkiln's ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "torchkiln":
            self.found[func._opname] += 1
        return func(*args, **kwargs or {})

    @property
    def norms(self) -> int:
        """Number of calls of norms that write E4M3."""
        return sum(count for name, count in self.found.items() if "norm_fp8" in name)


def model(cls: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(cls(), nn.Linear(SIZE, SIZE)).bfloat16()


def draw() -> Tensor:
    x = torch.randn(2, TOKENS, SIZE, generator=torch.Generator().manual_seed(1))
    return x.bfloat16().requires_grad_()


def results(found: Any, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of input and parameters."""
    y = found(x)
    leaves = [x, *found.parameters()]
    return [y, *torch.autograd.grad(y.float().square().sum(), leaves, materialize_grads=True)]


@pytest.mark.parametrize(
    ("cls", "norms"),
    [
        *((Layer, 2), (InlineLayer, 2), (DeadLayer, 2), (of(DecoratedAttention), 1)),
        *((of(ReadingAttention), 1), (of(OwnAttention), 1), (LateLayer, 0), (TwiceLayer, 0)),
        *((SeenLayer, 0), (PairLayer, 2)),
    ],
)
def test_norms_that_write_fp8(
    cls: type[nn.Module], norms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, x = model(cls), draw()
    torchkiln.replace(found, precision="fp8")
    with Count() as count:
        made = results(found, x)
    assert count.norms == norms
    monkeypatch.setattr(fed, "feeds", lambda *_: False)
    monkeypatch.setattr("torchkiln.patch.source.residual.feeds", lambda *_: False)
    with Count() as count:
        expected = results(found, x)
    assert not count.norms
    assert torch.equal(made[0], expected[0])
    for one, other in zip(made[1:], expected[1:], strict=True):
        assert (one - other).float().norm() <= 2.0**-8 * other.float().norm()


def test_readers_that_change_after_the_replacement() -> None:
    found, x = model(Layer), draw()
    torchkiln.replace(found, precision="fp8")
    layer = found[0]
    y = found(x)
    seen: list[Any] = []

    def norms() -> int:
        with Count() as count:
            assert torch.equal(found(x), y)
        return count.norms

    assert norms() == 2
    for module in (layer.attn, layer.attn.k_proj, layer.mlp, layer.mlp.up):
        hook = module.register_forward_pre_hook(lambda _, args: seen.extend(args))
        assert norms() == 1
        hook.remove()
    hook = layer.second.register_forward_hook(lambda *args: seen.append(args[-1]))
    assert norms() == 1
    hook.remove()
    assert seen
    assert all(type(value) is Tensor for value in seen)
    layer.attn.forward = functools.partial(type(layer.attn).forward, layer.attn)
    assert norms() == 1
    del layer.attn.forward
    layer.mlp.compile(backend="eager")
    assert norms() == 1
    layer.mlp._compiled_call_impl = None
    with torch.autocast("cpu", torch.bfloat16), Count() as count:
        found(x)
    assert not count.norms
    few = x[:1, :10]
    with Count() as count:
        found(few)
    assert not count.norms, "few rows run in the dtype of the layers"


def test_reports_name_norms_and_readers() -> None:
    report = torchkiln.replace(model(Layer), precision="fp8", dry_run=True)
    assert "second in FP8 where mlp takes it" in report["0"].now
    assert "first in FP8 where attn takes it" in report["0"].now
    report = torchkiln.replace(model(Layer), precision="fp8", only="linear")
    assert "takes it" not in str(report), "norms without an op stay"


def test_copies_pickles_checkpoints_and_the_way_back() -> None:
    plain = model(Layer)
    found, x = copy.deepcopy(plain), draw()
    report = torchkiln.replace(found, precision="fp8")
    y = results(found, x)
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        with Count() as count:
            assert all(map(torch.equal, results(other, x), y))
        assert count.norms == 2
    again: Any = checkpoint(found, x, use_reentrant=False)
    assert torch.equal(again, y[0])
    grads = torch.autograd.grad(again.float().square().sum(), [x, *found.parameters()])
    assert all(map(torch.equal, grads, y[1:]))
    with torch.no_grad():
        assert torch.equal(found(x), y[0])
    report.undo()
    assert torch.equal(found(x), plain(x))


E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16

KEPT: dict[str, list[tuple[Any, ...]]] = {
    "the input and the sum, for the norms": [("tokens", SIZE, BF16)] * 2,
    "norms, for the weights behind them": [("tokens", SIZE, E4M3)] * 2,
    "query, key, value, and what attention returns": [("tokens", SIZE, BF16)] * 4,
    "that, for the last weight": [(SIZE, "tokens", E4M3)],
    "gate and up": [("tokens", 4 * SIZE, BF16)],
    "the gated unit, for the last weight": [("tokens", 2 * SIZE, E4M3)],
    "weights, for gradients of inputs": [
        *([(SIZE, SIZE, E4M3)] * 4),
        (SIZE, 4 * SIZE, E4M3),
        (2 * SIZE, SIZE, E4M3),
    ],
}
"""Sizes and dtypes that a layer keeps for backward, without scales: one tensor per product."""


def test_what_a_layer_keeps_for_backward() -> None:
    found, x = model(Layer), draw()
    torchkiln.replace(found, precision="fp8")
    owned = {p.untyped_storage().data_ptr() for p in found.parameters()}
    kept: dict[int, tuple[int, int, torch.dtype]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        size = storage.nbytes() // tensor.itemsize
        if storage.data_ptr() not in owned and size >= 2 * TOKENS * SIZE:
            columns = tensor.shape[-1] if tensor.dim() < 4 else SIZE  # 4-d tensors have heads
            kept.setdefault(storage.data_ptr(), (size // columns, columns, tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = found[0](x)
    expected = Counter(
        tuple(2 * TOKENS if part == "tokens" else part for part in one)
        for each in KEPT.values()
        for one in each
    )
    assert Counter(kept.values()) == expected
    assert y.requires_grad


def test_graphs_keep_the_norms() -> None:
    found, x = model(Layer), draw()
    torchkiln.replace(found, precision="fp8")
    names: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled: Any = torch.compile(found, backend=record, fullgraph=True)
    y, expected = compiled(x), found(x)
    assert (y - expected).float().norm() < 0.02 * expected.float().norm()
    assert not [name for name in names if "norm_fp8" in name]
    assert [name for name in names if "norm" in name]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_have_the_products_of_the_layers(*, strict: bool) -> None:
    """Replaced layers export products without FP8, for any device; own FP8 modules export FP8."""
    found, x = model(Layer), draw().detach()
    plain = copy.deepcopy(found)
    torchkiln.replace(found, precision="fp8")
    program: Any = torch.export.export(found, (x,), strict=strict)
    assert not [node for node in program.graph.nodes if "fp8" in str(node.target)]
    y, expected = program.module()(x), plain(x)
    assert (y - expected).float().norm() < 2.0**-7 * expected.float().norm()
    own: Any = torchkiln.nn.TransformerBlock(SIZE, 4, hidden_features=SIZE, precision="fp8")
    tokens = torch.randn(1, TOKENS, SIZE)
    program = torch.export.export(own, (tokens,), strict=strict)
    targets = {str(node.target) for node in program.graph.nodes}
    names = ("rms_norm_fp8", "add_rms_norm_fp8", "gated_linear_fp8", "linear_fp8")
    assert {f"torchkiln.{name}.default" for name in names} <= targets
    assert all(map(torch.equal, program.module()(tokens), own(tokens)))


def test_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=SIZE,
        intermediate_size=2 * SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=5 * SIZE // 4,
        use_cache=False,
    )
    torch.manual_seed(0)
    found = transformers.LlamaForCausalLM(config).bfloat16()
    tokens = torch.arange(2 * TOKENS).view(2, -1)
    torchkiln.replace(found, precision="fp8")
    with Count() as count:
        found(tokens, labels=tokens).loss.backward()
    assert count.norms == 4
    assert count.found["_gated_fp8_backward"] == 2
    assert not count.found["_gated_backward"]
    # Per layer: the result of attention, and the gradients of q, k, v, o and down.
    assert count.found["quantize_both"] == 2 * (1 + 5)
    assert not count.found["quantize"]
