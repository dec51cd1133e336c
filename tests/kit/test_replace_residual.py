"""``torchkiln.replace``: residual sums and the norms behind them."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchkiln
from torchkiln.patch.source import residual, rewritten


class Norm(nn.Module):
    """An RMS norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Before(nn.Module):
    """A decoder layer with norms before its parts."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = Norm(size), Norm(size)
        self.mix, self.mlp = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: float = 0.0, **_: Any) -> Tensor:
        residual = x
        x = self.norm_1(x)
        x = self.mix(x) * scale
        x = residual + x
        residual = x
        x = self.norm_2(x)
        return residual + self.mlp(x) + shift


class After(nn.Module):
    """A layer with norms of sums."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.mix, self.mlp = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 1:
            x = self.norm_1(x + self.mix(x))
        total = x + self.mlp(x)
        y: Tensor = self.norm_2(total)
        return y


class Checkpointed(nn.Module):
    """Wraps the forward of each subclass, as Hugging Face's layers do."""

    checkpoints = False

    def __init_subclass__(cls) -> None:
        forward: Any = cls.forward

        @functools.wraps(forward)
        def wrapper(self: Any, *args: Any) -> Any:
            if self.checkpoints and type(self).forward is wrapper:
                return checkpoint(forward, self, *args, use_reentrant=False)
            return forward(self, *args)

        cls.forward = wrapper


class Layer(Checkpointed):
    """A layer with a checkpoint."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(size), nn.Linear(size, size)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        total = x + self.mix(x)
        y: Tensor = self.norm(total)
        return y + total


class Unlike(After):
    """Sums that stay as they are."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mix(x)
        total = total * 2
        x = self.norm_1(total)
        total = x + self.mlp(x)
        if x.dim() > 7:
            total = x
        y: Tensor = self.norm_2(total)
        return y


def outcome(model: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, list[Tensor]]:
    y = model(x, **options)
    return y, list(torch.autograd.grad(y.square().sum(), [x, *model.parameters()]))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused calls, as they happen."""
    calls: list[str] = []

    def added(plan: Any, norm: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(str(plan))
        return original(plan, norm, a, b)

    original = residual.added
    monkeypatch.setattr(residual, "added", added)
    return calls


@pytest.mark.parametrize(
    ("make", "now"),
    [
        (Before, "add_rms_norm at norm_2"),
        (After, "add_layer_norm at norm_2, add_layer_norm at norm_1"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_become_part_of_norms(
    make: type[nn.Module], now: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(make().to(dtype))
    x = torch.randn(3, 32, dtype=dtype, requires_grad=True)
    expected = outcome(model, x)
    report = torchkiln.replace(model)
    row = report["0"]
    assert (row.now, row.kind, row.replaced) == (now, "residual", True)
    assert row.same
    calls = counted(monkeypatch)
    found = outcome(model, x)
    assert len(calls) == len(now.split(","))
    error = 1e-7 if dtype == torch.float64 else 0.1
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=error, atol=error)
    report.undo()
    assert type(model[0]) is make
    assert torch.equal(model(x), expected[0])


def test_optional_arguments_and_names_stay() -> None:
    model = Before().double()
    x = torch.randn(3, 32, dtype=torch.float64)
    expected = model(x, 2.0, shift=3.0, other=None), model(x, scale=0.5)
    with torchkiln.replaced(model):
        torch.testing.assert_close(model(x, 2.0, shift=3.0, other=None), expected[0])
        torch.testing.assert_close(model(x, scale=0.5), expected[1])


def test_copies_pickles_and_compiled_models(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Before(), torch.randn(3, 32)
    torchkiln.replace(model)
    expected = model(x)
    calls = counted(monkeypatch)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
    assert calls == ["rms_norm(round=input)"] * 2
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def test_calls_that_the_op_does_not_take_run_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = After(), torch.randn(3, 32)
    expected = model(x)
    torchkiln.replace(model)
    calls = counted(monkeypatch)
    seen: list[Tensor] = []
    model.norm_1.register_forward_hook(lambda _m, _args, y: seen.append(y))
    torch.testing.assert_close(model(x), expected)
    assert len(seen) == len(calls) == 1
    model.norm_2 = nn.LayerNorm(32)  # one with its own forward
    model(x)
    assert len(calls) == 1
    broadcast = residual.add_norm(norm=model.norm_2, a=torch.randn(1, 32), b=x)
    assert broadcast[0].shape == x.shape


def test_the_wrapper_of_each_subclass_stays() -> None:
    model = Layer()
    x = torch.randn(3, 32, requires_grad=True)
    expected = outcome(model, x)
    assert torchkiln.replace(model)[""].now == "add_layer_norm at norm"
    model.calls, model.checkpoints = 0, True
    found = outcome(model, x)
    assert model.calls == 2  # once more in backward
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_reasons() -> None:
    assert not [r for r in torchkiln.replace(Unlike()) if r.kind == "residual"]
    plain = Before()
    assert not [r for r in torchkiln.replace(plain, only=["norm"]) if r.kind == "residual"]
    skipped = torchkiln.replace(nn.Sequential(Before()), skip=["0"], dry_run=True)
    assert not [r for r in skipped if r.kind == "residual"]
    kept = torchkiln.replace(nn.Sequential(Before()), skip=["0.norm_2"])
    assert not [r for r in kept if r.kind == "residual"]


def test_what_is_not_bitwise_equal_stays_with_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewritten.Rewrites, "is_bitwise", lambda *_: False)
    loose = torchkiln.replace(nn.Sequential(After()), dry_run=True)["0"]
    assert (loose.replaced, loose.same) == (True, "other rounding")
    assert not [r for r in torchkiln.replace(After(), exact=True).replaced if r.kind == "residual"]


def test_the_function_keeps_its_file_and_globals() -> None:
    plan = rewritten.Rewritten(Before, (("norm_2", "add_rms_norm"),))
    code = plan.function.__code__
    assert code.co_filename == Before.forward.__code__.co_filename
    assert code.co_firstlineno == Before.forward.__code__.co_firstlineno
    assert plan.function.__globals__ is Before.forward.__globals__
    assert plan.function.__kwdefaults__ == {"shift": 0.0}
    assert "_kiln_make" not in Before.forward.__globals__
