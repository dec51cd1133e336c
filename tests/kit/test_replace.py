"""``torchkiln.replace`` on small modules: which are replaced, which are not, and ``undo()``."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replace_models import Gated, OffsetRms, PlainLayer, Rms, model
from torch import Tensor, nn

import torchkiln


class NearlyRms(Rms):
    """A module close to RMS norm: it divides by the mean of |x| instead of an RMS."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x / (x.abs().mean(-1, keepdim=True) + self.tiny)


def test_finds_modules_by_formula() -> None:
    net = model()
    x = torch.randn(3, 16)
    before = net(x)
    report = torchkiln.replace(net)
    assert [row.now for row in report.rows if row.changed] == [
        "rms_norm(round=input)",
        "layer_norm",
        "rms_norm(offset=1)",
        "swiglu between the projections",
        "layer_norm(round=input)",
        "gelu_tanh",
    ]
    assert report["6"].reason == "torch's product is as fast"
    torch.testing.assert_close(net(x), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_results_and_gradients_in_other_dtypes(dtype: torch.dtype) -> None:
    net = model(dtype)
    wide = model(dtype).double()
    x = torch.randn(5, 16, dtype=dtype)
    torchkiln.replace(net)
    found = torch.autograd.grad(net(x).float().square().sum(), list(net.parameters()))
    truth = torch.autograd.grad(wide(x.double()).square().sum(), list(wide.parameters()))
    for one, other in zip(found, truth, strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < 40 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_round_where_the_module_does(dtype: torch.dtype) -> None:
    """Norms round as the module does; 1 % of elements may differ by the order of the sum."""
    x = torch.randn(64, 256).to(dtype)
    norms: list[tuple[nn.Module, str]] = [
        (Rms(256), "rms_norm(round=input)"),
        (OffsetRms(256), "rms_norm(offset=1)"),
    ]
    for norm, now in norms:
        before = norm.to(dtype)(x)
        assert torchkiln.replace(norm)[""].now == now
        assert (norm(x) != before).float().mean() < 0.01


def test_a_layer_norm_with_an_offset() -> None:
    class Offset(PlainLayer):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(x, x.shape[-1:], self.scale + 1, self.shift, 1e-5)

    norm, x = Offset(16), torch.randn(3, 16)
    before = norm(x)
    assert torchkiln.replace(norm)[""].now == "layer_norm(offset=1)"
    torch.testing.assert_close(norm(x), before)


def test_an_activation_with_a_dropout_stays() -> None:
    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(0.5 * x * (1 + torch.erf(x / 2**0.5)), 0.5, self.training)

    assert not torchkiln.replace(nn.Sequential(Dropped())).changed


def test_undo_is_bitwise() -> None:
    net = model()
    x = torch.randn(3, 16)
    before, classes = net(x), [type(m) for m in net.modules()]
    with torchkiln.replaced(net) as report:
        assert len(report.changed) == 6
        assert type(net[0]) is not Rms
        assert isinstance(net[0], Rms)
    assert [type(m) for m in net.modules()] == classes
    assert torch.equal(net(x), before)


def test_names_values_and_hooks_stay() -> None:
    net = model()
    state = net.state_dict()
    seen: list[str] = []
    net[0].register_forward_hook(lambda *_: seen.append("hook"))
    torchkiln.replace(net)
    net(torch.randn(2, 16))
    assert seen == ["hook"]
    assert list(net.state_dict()) == list(state)
    assert all(net.state_dict()[name] is not None for name in state)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_copies_and_pickles_keep_the_new_forward() -> None:
    net = model()
    torchkiln.replace(net)
    x = torch.randn(2, 16)
    stream = io.BytesIO()
    torch.save(net, stream)
    stream.seek(0)
    for other in (copy.deepcopy(net), torch.load(stream, weights_only=False)):
        assert [type(m) for m in other.modules()] == [type(m) for m in net.modules()]
        assert torch.equal(other(x), net(x))


def test_eps_is_read_from_the_attribute_that_holds_it() -> None:
    net = nn.Sequential(Rms(8, eps=1e-5))
    torchkiln.replace(net)
    setattr(net[0], "tiny", 0.25)  # noqa: B010  a name that torch does not declare
    x = torch.randn(2, 8)
    torch.testing.assert_close(net(x), Rms.forward(net[0], x))  # type: ignore[arg-type]


def test_other_formulas_are_left_alone() -> None:
    net = nn.Sequential(NearlyRms(8), nn.Embedding(3, 8))
    report = torchkiln.replace(net)
    assert not report.changed
    assert [row.reason for row in report.rows] == ["it calls abs", "no op of torchkiln"]


@pytest.mark.parametrize("form", ["separate", "packed", "packed swapped"])
def test_gated_units_call_their_submodules(form: str) -> None:
    net = Gated(form, p=0.5)
    x = torch.randn(3, 16)
    net.eval()
    before = net(x)
    assert torchkiln.replace(net).changed
    calls: list[nn.Module] = []
    for child in net.children():
        child.register_forward_hook(lambda module, *_: calls.append(module))
    torch.testing.assert_close(net(x), before)
    assert len(calls) == len(list(net.children()))
    net.train()
    torch.manual_seed(1)
    found = net(x)
    torch.manual_seed(1)
    torch.testing.assert_close(found, Gated.forward(net, x))


class ReadsWeight(Gated):
    """A unit that reads the dtype of a weight, as T5 does."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate(x)) * self.wide(x)
        weight: Any = self.down.weight
        if isinstance(weight, Tensor) and h.dtype != weight.dtype:
            h = h.to(weight.dtype)
        return self.down(h)


def test_a_projection_without_a_weight_runs_the_original_forward() -> None:
    unit: Any = ReadsWeight()
    x = torch.randn(3, 16)
    expected = unit(x)
    assert torchkiln.replace(unit)[""].now == "swiglu between the projections"
    torch.testing.assert_close(unit(x), expected)
    unit.gate = nn.Sequential(unit.gate)
    assert torch.equal(unit(x), expected)


def test_a_dropout_without_a_module_is_noticed() -> None:
    report = torchkiln.replace(Gated("hidden dropout"))
    assert report[""].reason == "it draws random numbers"


def test_mixed_dtypes_run_the_original_forward() -> None:
    net = nn.Sequential(Rms(8))
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    before = net(x)
    torchkiln.replace(net)
    assert before.dtype == torch.float32
    assert torch.equal(net(x), before)


def test_exact_replaces_only_equal_bits() -> None:
    net = nn.Sequential(OffsetRms(64), Gated()).bfloat16()
    report = torchkiln.replace(net, exact=True)
    assert (report["0"].bitwise, report["0"].dtype) == (True, "bfloat16")
    assert report["1"].reason == "not bitwise equal in bfloat16"
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    assert torch.equal(net[0](x), OffsetRms.forward(net[0], x))  # type: ignore[arg-type]


def test_only_skip_and_dry_run() -> None:
    net = model()
    assert {row.kind for row in torchkiln.replace(net, only=["norm"], dry_run=True).changed} == {
        "norm"
    }
    report = torchkiln.replace(net, skip=["0", "3*"], dry_run=True)
    assert report["0"].reason == report["3"].reason == "skip"
    by_function = torchkiln.replace(net, skip=lambda name, _: name == "0", dry_run=True)
    assert len(by_function.changed) == 5
    assert type(net[1]) is nn.LayerNorm
    expected = "only: got 'norms', expected one of norm, residual, activation"
    with pytest.raises(ValueError, match=expected):
        torchkiln.replace(net, only="norms")  # type: ignore[arg-type]


def test_models_on_the_meta_device() -> None:
    with torch.device("meta"):
        net = model()
    report = torchkiln.replace(net, dry_run=True)
    assert len(report.changed) == 6


def test_the_default_device_changes_no_report() -> None:
    net = model()
    expected = str(torchkiln.replace(net, dry_run=True))
    with torch.device("meta"):
        assert str(torchkiln.replace(net, dry_run=True)) == expected


class Counting(nn.Module):
    """A module whose forward draws a number, and changes a buffer and a list."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(1)
        return x + torch.rand(())


class Writing(Rms):
    """A norm whose forward creates a file."""

    path: Path

    def forward(self, x: Tensor) -> Tensor:
        self.path.touch()
        return super().forward(x)


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_search_leaves_no_trace(dry_run: bool, tmp_path: Path) -> None:
    net, writing = Counting(), Writing(8)
    writing.path = tmp_path / "file"
    state = torch.random.get_rng_state()
    report = torchkiln.replace(nn.ModuleList([net, writing]), dry_run=dry_run)
    assert "Path.touch" in report["1"].reason
    assert torch.equal(torch.random.get_rng_state(), state)
    assert net.calls == 0
    assert net.seen == []
    assert not writing.path.exists()


def test_modules_with_two_names_are_replaced_once() -> None:
    norm = Rms(8)
    report = torchkiln.replace(nn.ModuleList([norm, norm]))
    assert [row.name for row in report.rows] == ["0"]
    report.undo()
    assert type(norm) is Rms


def test_modules_that_others_have_patched() -> None:
    net = nn.ModuleList([Rms(8), torchkiln.nn.RMSNorm(8), Rms(8)])
    net[0].forward = lambda x: x
    torchkiln.replace(net[2])
    whys = [row.reason for row in torchkiln.replace(net).rows]
    assert whys == [
        "its forward is an attribute of the instance, set by test_replace",
        "is torchkiln's already",
        "is torchkiln's already",
    ]


def test_undo_after_another_change_of_the_class() -> None:
    norm = Rms(8)
    report = torchkiln.replace(norm)
    norm.__class__ = type("Wrapped", (type(norm),), {})
    with pytest.raises(RuntimeError, match="got a module of Wrapped, expected KilnRms"):
        report.undo()


def factory() -> nn.Module:
    """The model for a test of the command line."""
    return nn.Sequential(Rms(8), nn.Linear(8, 8))
