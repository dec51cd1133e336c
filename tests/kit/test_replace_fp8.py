"""``torchkiln.replace(model, precision="fp8")``: the replaced layers, their products, undo().

The tests lift the refusal of CPUs, which only emulate FP8, and the least sizes of layers.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchkiln
from torchkiln import linear_fp8
from torchkiln.nn.quantize import CACHES
from torchkiln.patch import fp8
from torchkiln.patch.plan import plan_of

SIZE, TOKENS, CLASSES = 128, 96, 304


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allows FP8 on the CPU, for layers that are faster from 46 rows on."""

    def nothing(*_: Any) -> str:
        return ""

    monkeypatch.setattr(fp8, "missing", nothing)
    monkeypatch.setattr(fp8, "LEAST", 27)
    monkeypatch.setattr("torchkiln.nn.quantize.has_group", lambda: False)  # another test's group
    yield
    torch._dynamo.reset()


class FeedForward(nn.Module):
    """A gated unit, as in Hugging Face's models."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(SIZE, 2 * SIZE, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Model(nn.Module):
    """A model with layers that FP8 replaces, and others: embeddings, router, odd sizes, head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, SIZE)
        self.positions = nn.Embedding(SIZE, SIZE)
        self.norm, self.feed = nn.RMSNorm(SIZE), FeedForward()
        self.router = nn.Linear(SIZE, 8)
        self.odd = nn.Linear(SIZE, SIZE + 1)
        self.act, self.mixed = nn.GELU(), nn.Linear(SIZE, SIZE)
        self.own = torchkiln.nn.GatedMLP(SIZE, SIZE)
        self.head = nn.Linear(SIZE, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(tokens % SIZE)
        x = x + self.feed(self.norm(x)) + self.odd(x)[..., 1:]
        x = x + self.own(self.act(self.mixed(x))) * self.router(x).amax(-1, keepdim=True)
        y: Tensor = self.head(x)
        return y


def model() -> Any:
    torch.manual_seed(0)
    return Model().bfloat16()


def batch() -> Tensor:
    return torch.arange(TOKENS).view(2, -1) * 3


def require_product(device: torch.device) -> None:
    """Skips on a GPU that has no products in FP8."""
    if device.type == "cuda" and (reason := fp8.found_missing("cuda", 0)):
        pytest.skip(reason)


def named(report: Any) -> dict[str, str]:
    """The layers that multiply in FP8, with their new calls."""
    return {row.name: row.now for row in report.changed if "fp8" in row.now}


IN_FP8 = dict.fromkeys(("feed.gate", "feed.up", "feed.down", "mixed"), "linear_fp8")
IN_FP8["own"] = "two linear_fp8"


@pytest.mark.usefixtures("served")
def test_the_layers_that_gain() -> None:
    found = model()
    before = dict(found.state_dict())
    report = torchkiln.replace(found, precision="fp8")
    assert named(report) == IN_FP8
    assert report["head"].reason == "FP8 leaves outputs of the model alone, unless head='fp8'"
    assert report["router"].reason == "8 x 128: FP8 pads sizes that are no multiples of 16"
    assert report["odd"].reason == "129 x 128: FP8 pads sizes that are no multiples of 16"
    row = report["mixed"]
    assert row.error_now is not None
    assert row.error_was is not None
    assert 10 * row.error_was < row.error_now < 0.05
    assert report["feed"].now == "swiglu between the projections"
    assert "linear_fp8" in str(report)
    assert list(found.state_dict()) == list(before)
    assert all(
        value is before[name] or torch.equal(value, before[name])
        for name, value in found.state_dict().items()
    )
    report.undo()
    assert type(found.mixed) is nn.Linear
    assert not any(layer in CACHES for layer in found.modules())


@pytest.mark.usefixtures("served")
def test_the_head_by_its_word() -> None:
    assert "head" in named(torchkiln.replace(model(), precision="fp8", head="fp8"))
    tied = model()
    tied.mixed.weight = tied.positions.weight
    assert "mixed" not in named(torchkiln.replace(tied, precision="fp8"))
    last = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE))
    report = torchkiln.replace(last, precision="fp8", dry_run=True)
    assert list(named(report)) == ["0"]
    assert report["0"].outcome == "would replace"


def test_sizes_from_which_a_product_gains() -> None:
    assert fp8.least_rows(1024, 1024) is None
    rows = fp8.least_rows(1024, 4096)
    assert rows is not None
    assert 2048 < rows <= 4096  # with 2048 rows bfloat16 is faster
    wide = fp8.least_rows(14336, 4096)
    assert wide is not None
    assert wide < rows
    layer = nn.Linear(4096, 1024, device="meta")
    assert fp8.gains(rows, layer.weight)
    assert not fp8.gains(rows - 1, layer.weight)


class Count(TorchDispatchMode):
    """Counts the calls of torchkiln's ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "torchkiln":
            self.found[func._opname] += 1
        return func(*args, **kwargs or {})


@pytest.mark.usefixtures("served")
def test_products_are_those_of_the_op(device: torch.device) -> None:
    require_product(device)
    found = model().to(device)
    x = torch.randn(TOKENS, SIZE, dtype=torch.bfloat16, device=device, requires_grad=True)
    torchkiln.replace(found, precision="fp8")
    feed = found.feed
    leaves = (x, *feed.parameters())
    y = feed(x)
    grads = torch.autograd.grad(y.float().square().sum(), leaves)
    h = torchkiln.swiglu(linear_fp8(x, feed.gate.weight), linear_fp8(x, feed.up.weight))
    assert torch.equal(y, linear_fp8(h, feed.down.weight))
    weight = torch.cat((feed.gate.weight, feed.up.weight))
    z = linear_fp8(torchkiln.gated_linear_fp8(x, weight), feed.down.weight)
    expected = torch.autograd.grad(z.float().square().sum(), leaves)
    assert all(map(torch.equal, grads, expected))
    with Count() as count, torch.no_grad():
        assert torch.equal(feed(x), y)
    assert count.found["gated_linear_fp8"] == 1, "gate and up are one product"
    assert not count.found["quantize_weight"]


@pytest.mark.usefixtures("served")
def test_weights_of_gate_and_up_are_trained() -> None:
    """Gate and up have one quantised copy, made again after each step; gradients accumulate."""
    feed: Any = FeedForward().bfloat16()
    plain: Any = FeedForward().bfloat16()
    plain.load_state_dict(feed.state_dict())
    torchkiln.replace(nn.Sequential(feed, nn.Linear(4, 4)), precision="fp8")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (feed, plain)]
    for step in range(3):
        x = torch.randn(2, TOKENS, SIZE, dtype=torch.bfloat16)
        for part in x:
            for one in (feed, plain):
                one(part).float().square().sum().backward()
        for (name, one), other in zip(feed.named_parameters(), plain.parameters(), strict=True):
            close = F.cosine_similarity(one.grad.float().flatten(), other.grad.float().flatten(), 0)
            assert close > 0.98, (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    feed.gate.weight.requires_grad_(False)  # now gate and up multiply separately
    feed(x[0]).float().square().sum().backward()
    assert feed.gate.weight.grad is None
    assert feed.up.weight.grad is not None


class PackedFeed(nn.Module):
    """A gated unit with one projection for both halves and a dropout; ``swapped`` halves."""

    def __init__(self, *, swapped: bool, bias: bool) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(SIZE, 2 * SIZE, bias), nn.Linear(SIZE, SIZE)
        self.dropout, self.swapped = nn.Dropout(0.1), swapped

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.both(x).chunk(2, -1)
        h = one * F.gelu(other) if self.swapped else F.gelu(one) * other
        y: Tensor = self.down(self.dropout(h))
        return y


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_gates_of_one_projection_write_fp8(*, swapped: bool, bias: bool) -> None:
    feed = PackedFeed(swapped=swapped, bias=bias).bfloat16()
    torchkiln.replace(nn.Sequential(feed, nn.Linear(4, 4)), precision="fp8")
    x = torch.randn(TOKENS, SIZE, dtype=torch.bfloat16)
    one, other = linear_fp8(x, feed.both.weight, feed.both.bias).chunk(2, -1)
    h = torchkiln.geglu(other, one) if swapped else torchkiln.geglu(one, other)
    expected = linear_fp8(h, feed.down.weight, feed.down.bias)
    with Count() as count:
        feed(x)  # in training, a dropout runs between gate and down
    assert not count.found["_gated_fp8"] + count.found["gated_linear_fp8"]
    feed.eval()
    with Count() as count:
        assert torch.equal(feed(x), expected)
    assert count.found["_gated_fp8"] == 1
    inputs: list[Any] = []
    feed.down.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    assert torch.equal(feed(x), expected)
    assert torch.equal(inputs[0], h)


@pytest.mark.usefixtures("served")
def test_few_rows_run_in_the_dtype_of_the_layer() -> None:
    found = model()
    plain = copy.deepcopy(found)
    torchkiln.replace(found, precision="fp8", only="linear")
    few, many = torch.arange(30)[None], torch.arange(50)[None]
    assert torch.equal(found(few), plain(few))
    assert not torch.equal(found(many), plain(many))


@pytest.mark.usefixtures("served")
def test_gradients_point_the_same_way(device: torch.device) -> None:
    require_product(device)
    found, plain, tokens = model().to(device), model().to(device), batch().to(device)
    torchkiln.replace(found, precision="fp8")
    for one in (found, plain):
        F.cross_entropy(one(tokens).float().flatten(0, 1), tokens.flatten()).backward()
    for (name, one), other in zip(found.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        close = F.cosine_similarity(one.grad.float().flatten(), other.grad.float().flatten(), 0)
        assert close > 0.97, name


@pytest.mark.usefixtures("served")
def test_compiled_without_a_graph_break(device: torch.device) -> None:
    require_product(device)
    found, tokens = model().to(device), batch().to(device)
    torchkiln.replace(found, precision="fp8")
    counters.clear()
    compiled: Any = torch.compile(found, backend="aot_eager", fullgraph=True)
    for given in (tokens, tokens[:, :32]):
        y = compiled(given)
        expected = found(given)
        # In the graph, torch computes norms and gates; their roundings enter the same products.
        assert (y - expected).float().norm() < 0.02 * expected.float().norm()
        y.float().square().mean().backward()
    assert not counters["graph_break"]
    layer = found.mixed
    x = torch.randn(TOKENS, SIZE, dtype=torch.bfloat16, device=device)
    alone: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(alone(x), layer(x))


@pytest.mark.usefixtures("served")
def test_copies_pickles_and_checkpoints() -> None:
    found = model()
    torchkiln.replace(found, precision="fp8")
    y = found(batch())
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert isinstance(plan_of(other.mixed), fp8.LinearInFP8)
        assert torch.equal(other(batch()), y)
    again: Any = checkpoint(found, batch(), use_reentrant=False)
    assert torch.equal(again, y)
    first = torch.autograd.grad(y.float().square().sum(), list(found.parameters()))
    second = torch.autograd.grad(again.float().square().sum(), list(found.parameters()))
    assert all(map(torch.equal, first, second))


@pytest.mark.usefixtures("served")
def test_weights_are_quantised_once_per_version() -> None:
    found = model()
    torchkiln.replace(found, precision="fp8")
    optimizer = torch.optim.SGD(found.parameters(), lr=1.0)
    for _ in range(2):
        with Count() as count:
            for _ in range(3):  # three micro-batches
                found(batch()).float().square().mean().backward()
        assert count.found["quantize_weight"] == 5  # one per weight; gate and up share one
        optimizer.step()


@pytest.mark.usefixtures("served")
def test_transforms_run_the_original_forward() -> None:
    found = model()
    plain = copy.deepcopy(found.mixed)
    torchkiln.replace(found, precision="fp8")
    x = torch.randn(TOKENS, SIZE, dtype=torch.bfloat16)

    def loss(layer: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: layer(x).float().sum()

    assert torch.equal(torch.func.grad(loss(found.mixed))(x), torch.func.grad(loss(plain))(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found.mixed(x.float()), found.mixed(x))
        found.feed(x.float()).float().sum().backward()


@pytest.mark.usefixtures("served")
def test_layers_that_are_slower_on_an_example_stay() -> None:
    """Layers that are slower on the example are not replaced: on a CPU all, as FP8 is emulated."""
    found = model()
    report = torchkiln.replace(found, precision="fp8", only="linear", example=batch())
    assert not named(report)
    assert report["mixed"].reason == "slower on the example"
    assert not any(layer in CACHES for layer in found.modules())


def test_a_graph_has_what_is_missing_as_a_constant() -> None:
    def call(x: Tensor) -> Tensor:
        return x + 1 if fp8.missing(x.device.type, x.device.index) else x

    counters.clear()
    compiled: Any = torch.compile(call, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    torch._dynamo.reset()


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8.found_missing.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    large = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 16)).to("meta")
    report = torchkiln.replace(large, precision="fp8")
    assert report["0"].reason == "FP8 needs a GPU of compute capability 9.0, got meta"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert fp8.missing("cuda", 0) == "FP8 needs compute capability 9.0, got 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert fp8.missing("cuda", 1) == "FP8 needs a torch with CUDA 12.9, got 12.8"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not fp8.missing("cuda", 2)
    fp8.found_missing.cache_clear()
    double = nn.Sequential(nn.Linear(4096, 4096).to("meta", torch.float64), nn.Linear(4, 4))
    assert torchkiln.replace(double, precision="fp8")["0"].reason == "FP8 rounds no float64"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp4"}, "precision: got 'fp4', expected 'fp8' or None"),
        ({"head": "fp8"}, "head: got 'fp8', expected precision='fp8' beside it"),
        ({"precision": "fp8", "exact": True}, "precision: got 'fp8' with exact=True"),
        ({"precision": "fp8", "only": "norm"}, "only: got norm with precision='fp8'"),
    ],
)
def test_words_that_contradict_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        torchkiln.replace(nn.Linear(8, 8), **options)


@pytest.mark.parametrize("skip", ["own", "own.down"])
@pytest.mark.usefixtures("served")
def test_a_pair_or_a_layer_of_it_is_skipped(skip: str) -> None:
    """A pair computes both layers without calling them, so skipping one of them skips both."""
    model = nn.Module()
    model.own = torchkiln.nn.GatedMLP(SIZE, 2 * SIZE)
    model.other = nn.Linear(SIZE, SIZE)
    model.last = nn.Linear(SIZE, SIZE)
    report = torchkiln.replace(model, precision="fp8", only="linear", skip=[skip])
    assert {row.name for row in report.changed} == {"other"}
    assert type(model.own.gate_up) is nn.Linear
