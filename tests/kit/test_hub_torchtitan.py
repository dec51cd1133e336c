"""The overrides for torchtitan, applied by torchtitan; skipped if it is not installed."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("spmd_types", reason="torchtitan's package of types is not installed")
pytest.importorskip("torchtitan.models.common.rope", reason="torchtitan is not installed")

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import Configurable, OverrideConfig, apply_overrides
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

from torchkiln.hub import torchtitan as overrides

PATH = "torchkiln.hub.torchtitan"
DTYPES = [torch.float32, torch.bfloat16]


class Root(Configurable):
    """The root of a tree of configurations: one part."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        part: Any


def overridden(config: Any, name: str) -> Any:
    """The configuration after an override, as torchtitan applies it."""
    root = Root.Config(part=copy.deepcopy(config))
    apply_overrides(OverrideConfig(imports=[f"{PATH}.{name}"]), root)
    return root.part


def pair(config: Any, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Torchtitan's module and the overridden one, with the same parameters."""
    new = overridden(config, name)
    assert type(new).__module__ == PATH
    was, now = config.build(), new.build()
    assert isinstance(now, type(was))
    for parameter in was.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.2)
    now.load_state_dict(was.state_dict())
    assert now.state_dict().keys() == was.state_dict().keys()
    if name == "rope":
        return was, now
    return was.to(dtype), now.to(dtype)


def outcome(module: Any, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Results, and gradients of inputs and parameters for fixed incoming gradients."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    module.zero_grad()
    y = module(*leaves)
    results = y if isinstance(y, tuple) else (y,)
    drawn = torch.Generator().manual_seed(0)
    given = [torch.randn(part.shape, generator=drawn).to(part.dtype) for part in results]
    torch.autograd.backward(results, given)
    found = [*results, *(x.grad for x in leaves), *(p.grad for p in module.parameters())]
    return [x.double() for x in found if x is not None]


def compare(was: Any, now: Any, inputs: tuple[Any, ...], calls: set[str], wanted: str) -> None:
    """Errors against float64 are at most twice torchtitan's, and torchkiln's op is called."""
    double = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    truth = outcome(copy.deepcopy(was).double() if wanted != "rope" else was, double)
    expected = outcome(was, inputs)
    assert not calls
    found = outcome(now, inputs)
    assert f"_{wanted}_forward" in calls or wanted in calls
    for exact, one, other in zip(truth, expected, found, strict=True):
        least = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
        assert (other - exact).abs().max() <= 2 * (one - exact).abs().max() + least


class Names(TorchDispatchMode):
    """Records the names of called ops of torchkiln."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "torchkiln":
            self.found.add(op.name().partition("::")[2].partition(".")[0])
        return op(*args, **(kwargs or {}))


@pytest.fixture
def calls() -> Iterator[set[str]]:
    """The names of torchkiln's ops that are called in a test."""
    with Names() as names:
        yield names.found


def linear(size: int, out: int) -> Any:
    return Linear.Config(in_features=size, out_features=out)


GATED = {"w1": linear(16, 32), "w2": linear(32, 16), "w3": linear(16, 32)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm(calls: set[str], dtype: torch.dtype) -> None:
    was, now = pair(RMSNorm.Config(normalized_shape=16), "rms_norm", dtype)
    x = torch.randn(3, 5, 16, dtype=dtype)
    compare(was, now, (x,), calls, "norm")


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_norm_with_a_weight_of_another_dtype_is_torchtitans() -> None:
    was, now = pair(RMSNorm.Config(normalized_shape=16), "rms_norm", torch.float32)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    assert torch.equal(now(x), was(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_feed_forward(calls: set[str], dtype: torch.dtype) -> None:
    was, now = pair(FeedForward.Config(**GATED), "feed_forward", dtype)
    compare(was, now, (torch.randn(3, 5, 16, dtype=dtype),), calls, "swiglu")


def test_derived_classes_stay() -> None:
    gated = SigmoidGatedFeedForward.Config(**GATED, gate=linear(16, 1))
    assert type(overridden(gated, "feed_forward")) is SigmoidGatedFeedForward.Config

    @dataclass(kw_only=True, slots=True)
    class Other(CosSinRoPE.Config):
        pass

    assert type(overridden(Other(dim=8, max_seq_len=4), "rope")) is Other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", [CosSinRoPE, ComplexRoPE])
@pytest.mark.parametrize("places", ["none", "shared", "own"])
def test_rope(calls: set[str], dtype: torch.dtype, cls: Any, places: str) -> None:
    was, now = pair(cls.Config(dim=8, max_seq_len=32), "rope", dtype)
    q, k = (torch.randn(2, 5, heads, 8, dtype=dtype) for heads in (4, 2))
    drawn = {"shared": torch.arange(5)[None] + 7, "own": torch.randint(32, (2, 5))}
    positions = (drawn[places],) if places in drawn else ()
    compare(was, now, (q, k, *positions), calls, "rope")
    now._init_self_buffers()
    assert now.factors()[0].shape == (32, 4)
    assert now.tables[0] is now.cache  # computed from the new cache


def test_rope_under_compile_is_torchtitans() -> None:
    was, now = pair(CosSinRoPE.Config(dim=8, max_seq_len=32), "rope", torch.float32)
    q, k = (torch.randn(2, 5, heads, 8) for heads in (4, 2))
    compiled: Any = torch.compile(now, backend="eager", fullgraph=True)
    for found, expected in zip(compiled(q, k), was(q, k), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss(calls: set[str], dtype: torch.dtype) -> None:
    logits = torch.randn(2, 5, 33, dtype=dtype)
    labels = torch.randint(33, (2, 5))
    labels[0, :3] = -100
    valid = torch.tensor(7)
    found: list[tuple[Tensor, Any]] = []
    for config in (CrossEntropyLoss.Config(), overridden(CrossEntropyLoss.Config(), "loss")):
        x = logits.clone().requires_grad_()
        calls.clear()
        loss, metrics = config.build()(x, labels, valid)
        assert not metrics
        loss.backward()
        assert ("_cross_entropy_forward" in calls) == (len(found) == 1)
        found.append((loss, x.grad))
    (was, grad_was), (now, grad_now) = found
    assert now.dtype == torch.float32
    assert math.isclose(now.item(), was.item(), rel_tol=1e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad_now, grad_was, rtol=2 * eps, atol=eps / 32)


def test_sharded_tensors_run_torchtitans_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "DTensor", Tensor)  # every tensor counts as distributed
    was, now = pair(RMSNorm.Config(normalized_shape=16), "rms_norm", torch.float32)
    x = torch.randn(3, 16)
    assert torch.equal(now(x), was(x))
