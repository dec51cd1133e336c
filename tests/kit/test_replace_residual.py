"""``torchkiln.replace``: residual sums that are fused with the norms after them."""

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
from torchkiln.patch import fed
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
    """A decoder layer with a norm before each part."""

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
    """A decoder layer with a norm of each sum."""

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
    """A base that wraps the forward of each subclass, as that of Hugging Face's layers does."""

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
    """A decoder layer whose forward can be checkpointed."""

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
    """Sums that are not fused with the norms behind them."""

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
    """The plan of each fused call, in order."""
    calls: list[str] = []

    def added(plan: Any, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(str(plan))
        return fed.added(plan, *given, **options)

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
    assert (row.now, row.kind, row.changed) == (now, "residual", True)
    assert row.bitwise is not None
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
    model.norm_2 = nn.LayerNorm(32)  # a norm with its own forward
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
    assert model.calls == 2  # backward runs it once more
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_reasons() -> None:
    assert not [r for r in torchkiln.replace(Unlike()).rows if r.kind == "residual"]
    plain = Before()
    assert not [r for r in torchkiln.replace(plain, only=["norm"]).rows if r.kind == "residual"]
    skipped = torchkiln.replace(nn.Sequential(Before()), skip=["0"], dry_run=True)
    assert not [r for r in skipped.rows if r.kind == "residual"]
    kept = torchkiln.replace(nn.Sequential(Before()), skip=["0.norm_2"])
    assert not [r for r in kept.rows if r.kind == "residual"]


def test_what_is_not_bitwise_equal_stays_with_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewritten.Rewrites, "is_bitwise", lambda *_: False)
    loose = torchkiln.replace(nn.Sequential(After()), dry_run=True)["0"]
    assert (loose.changed, loose.bitwise) == (True, False)
    assert not [r for r in torchkiln.replace(After(), exact=True).changed if r.kind == "residual"]


def test_the_function_keeps_its_file_and_globals() -> None:
    plan = rewritten.Rewritten(Before, (("norm_2", "add_rms_norm"),))
    code = plan.function.__code__
    assert code.co_filename == Before.forward.__code__.co_filename
    assert code.co_firstlineno == Before.forward.__code__.co_firstlineno
    assert plan.function.__globals__ is Before.forward.__globals__
    assert plan.function.__kwdefaults__ == {"shift": 0.0}
    assert "_kiln_make" not in Before.forward.__globals__


class Swapping(nn.Module):
    """A layer that exchanges its norms, or raises an error, within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(32), nn.LayerNorm(32, elementwise_affine=False)
        self.mix, self.drop = nn.Linear(32, 32), nn.Dropout(0.5)
        nn.init.constant_(self.norm.weight, 3.0)
        self.stops = False

    def swap(self, x: Tensor) -> Tensor:
        """Exchange the norms, or raise an error."""
        if self.stops:
            raise KeyError
        self.norm, self.other = self.other, self.norm
        return self.mix(x)


class SwapInSum(Swapping):
    """The sum exchanges the norms before the norm is read."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.swap(x)
        y: Tensor = self.norm(total)
        return y


class SwapInArgument(Swapping):
    """The norm is read before its argument exchanges the norms."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.swap(x))
        return y


class SwapBehindDropout(Swapping):
    """The norms are exchanged before the dropout; the norm is read after it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.swap(x))
        y: Tensor = self.norm(h + x)
        return y


class RandomBehindDropout(Swapping):
    """The dropout draws its mask before the other summand draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.drop(x) + torch.rand(32))
        return y


class Caught(Swapping):
    """If the norm raises an error, the sum has already been assigned."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        try:
            y = x + self.mix(x)
            x = self.norm(y)
        except KeyError:
            return y
        return x


@pytest.mark.parametrize(
    "make", [SwapInSum, SwapInArgument, SwapBehindDropout, RandomBehindDropout, Caught]
)
@pytest.mark.parametrize("training", [False, True])
def test_the_order_of_evaluation(
    make: type[Swapping], *, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torchs(x: Tensor, to: Tensor, p: float) -> Tensor:
        return nn.functional.dropout(x, p) + to

    monkeypatch.setattr(residual, "dropout_add", torchs)
    model = make().train(training)
    twin = copy.deepcopy(model)
    torchkiln.replace(model)
    for seed in range(3):
        results = []
        for one in (model, twin):
            torch.manual_seed(seed)
            results.append((one(torch.ones(2, 32)), torch.rand(1)))
        torch.testing.assert_close(results[0], results[1])

    def failing(*_: Any) -> None:
        raise KeyError

    for one in (model, twin):
        one.norm.register_forward_hook(failing)
        one.other.register_forward_hook(failing)
    if make is Caught:
        assert torch.equal(model(torch.ones(2, 32)), twin(torch.ones(2, 32)))
    else:
        for one in (model, twin):
            with pytest.raises(KeyError):
                one(torch.ones(2, 32))


@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_r", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [nn.LayerNorm, Norm])
def test_dtypes_under_autocast(
    make: type[nn.Module], of_x: torch.dtype, of_r: torch.dtype, dtype: torch.dtype
) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = make(32), nn.Dropout(0.5)

        def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
            total = r + self.drop(x)
            y = self.norm(total)
            return y, total

    model = Residual().to(dtype)
    x, r = torch.randn(2, 32).to(of_x), torch.randn(2, 32).to(of_r)

    def outcomes() -> list[Any]:
        found: list[Any] = []
        for training in (False, True):
            model.train(training)
            for enabled in (False, True):
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    try:
                        found += [y.dtype for y in model(x, r)]
                    except (RuntimeError, ValueError):
                        found.append("raises")
        return found

    expected = outcomes()
    report = torchkiln.replace(model)
    assert outcomes() == expected, report


def test_the_layout_of_a_sum_is_that_of_its_first_summand() -> None:
    model = After().eval()
    x = torch.randn(32, 4).T
    expected = model.mix(x) + x, x + model.mix(x)
    assert expected[0].is_contiguous()
    assert not expected[1].is_contiguous()
    for a, b in ((model.mix(x), x), (x, model.mix(x))):
        torchkiln.replace(model)
        _, total = residual.add_norm(norm=model.norm_1, a=a, b=b)
        assert total.stride() == (a + b).stride()
