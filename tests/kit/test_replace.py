"""``torchkiln.replace`` on small modules: what is found, what stays, and the way back."""

from __future__ import annotations

import copy
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from torchkiln.cli import main


class Rms(nn.Module):
    """The norm of Llama's family, with its own names."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(size))
        self.tiny = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.gamma * wide.to(x.dtype)


class OffsetRms(nn.Module):
    """The norm of Gemma's family: the weight is stored without its 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight.float())).to(x.dtype)


class PlainLayer(nn.Module):
    """A layer norm whose weight and bias have other names."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(size))
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.scale
            + self.shift
        )


class NearlyRms(Rms):
    """Not a norm of ours: the mean has an exponent of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x / (x.abs().mean(-1, keepdim=True) + self.tiny)


class SlowGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3))))


class Gated(nn.Module):
    """A gated feed-forward; ``form`` says how it is written."""

    def __init__(self, form: str = "separate", p: float = 0.0) -> None:
        super().__init__()
        self.form = form
        self.wide = nn.Linear(16, 48 if "packed" in form else 24)
        self.gate = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.dropout = nn.Dropout(p)
        if "packed" in form:
            del self.gate

    def forward(self, x: Tensor) -> Tensor:
        if "packed" in self.form:
            halves = self.wide(x).chunk(2, -1)
            up, gate = halves if self.form == "packed swapped" else halves[::-1]
        else:
            gate, up = self.gate(x), self.wide(x)
        h = F.silu(gate) * up
        if self.form == "hidden dropout":
            return self.down(F.dropout(h, 0.5, self.training))
        return self.down(self.dropout(h))


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [Rms(16), nn.LayerNorm(16), OffsetRms(16), Gated(), PlainLayer(16), SlowGelu()]
    return nn.Sequential(*parts, nn.Linear(16, 4)).to(dtype)


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
    """One element in 100 may differ: the sum of squares is added up in another order."""
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


class Counting(nn.Module):
    """Its forward draws a number, and changes a buffer and a list."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(1)
        return x + torch.rand(())


def test_the_search_leaves_no_trace() -> None:
    net = Counting()
    state = torch.random.get_rng_state()
    torchkiln.replace(net)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert net.calls == 0
    assert net.seen == []


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


def test_report_as_text_and_json() -> None:
    net = nn.Sequential(Rms(8), Rms(8), nn.Linear(8, 8))
    report = torchkiln.replace(net)
    first, second, third, last = str(report).splitlines()
    assert first.split() == [
        "modules",
        "was",
        "now",
        "same",
        "error",
        "was",
        "->",
        "now",
        "outcome",
    ]
    assert second.startswith("2 ")
    assert second.endswith("replaced")
    assert third.endswith("kept: torch's product is as fast")
    assert last == "2 of 3 modules replaced"
    assert repr(report) == str(report)
    assert report._repr_html_().startswith("<table><tr><th>modules</th>")
    assert json.loads(report.to_json()) == report.as_dict()
    assert report.as_dict()["schema"] == "torchkiln.replace/1"
    first_row, *_ = report.as_dict()["rows"]
    assert first_row["outcome"] == "replaced"
    assert first_row["error_ratio"] == first_row["error_now"] / first_row["error_was"]


def test_exact_batch_norms_are_refused() -> None:
    """They would never be found."""
    with pytest.raises(ValueError, match="only: got 'batch_norm' with exact=True, expected other"):
        torchkiln.replace(nn.Sequential(), exact=True, only=["batch_norm"])


def test_a_class_is_unregistered() -> None:
    torchkiln.replace.register(Rms, lambda _, x: x, inputs=lambda _: torch.ones(8))
    torchkiln.replace.unregister(Rms)
    assert torchkiln.replace(nn.Sequential(Rms(8)))["0"].kind == "norm"
    with pytest.raises(KeyError, match="unregister: cls: got Rms, expected a class that was regis"):
        torchkiln.replace.unregister(Rms)


def test_report_is_a_mapping_from_names() -> None:
    net = nn.Sequential(Rms(8), Rms(8), nn.Linear(8, 8))
    report = torchkiln.replace(net)
    assert list(report) == [row.name for row in report.rows] == ["0", "1", "2"]
    assert "0" in report
    assert "3" not in report
    assert report.get("3") is None
    assert report.changed == (report["0"], report["1"])
    assert report.model is net
    dry = torchkiln.replace(nn.Sequential(Rms(8)), dry_run=True)
    assert [row.outcome for row in dry.changed] == ["would replace"]
    with pytest.raises(KeyError, match="got 'x', expected the name of a module"):
        report["x"]


@pytest.mark.parametrize("as_given", [lambda x: x, lambda x: (x,), lambda x: {"input": x}])
def test_example_measures_errors_and_times(as_given: Any) -> None:
    net = nn.Sequential(Rms(16), Gated()).bfloat16()
    report = torchkiln.replace(net, example=as_given(torch.randn(4, 16, dtype=torch.bfloat16)))
    assert net.training
    for row in report.changed:
        assert row.error_was is not None
        assert row.error_now is not None
        assert 0 < row.error_now <= 1.1 * row.error_was < 0.1
        assert row.seconds_was
        assert row.seconds_now
    assert "us was -> now" in str(report)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend: str) -> None:
    net = model()
    x = torch.randn(3, 16)
    expected = net(x)
    torchkiln.replace(net)
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), expected)


def test_exports() -> None:
    net = model().eval()
    torchkiln.replace(net)
    x = torch.randn(3, 16)
    program = torch.export.export(net, (x,))
    torch.testing.assert_close(program.module()(x), net(x))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x, x]).sum(0)


def faster(_: Doubled, x: Tensor) -> Tensor:
    return torchkiln.add(x, x)


def wrong(_: Doubled, x: Tensor) -> Tensor:
    return x


def test_registered_forwards_join_if_they_are_right() -> None:
    register = torchkiln.replace.register
    try:
        register(Doubled, faster, inputs=lambda _: torch.linspace(-1, 1, 9, dtype=torch.float64))
        net = nn.Sequential(Doubled())
        report = torchkiln.replace(net)
        assert report["0"].now == "faster"
        assert torch.equal(copy.deepcopy(net)(torch.ones(2)), torch.full([2], 2.0))
        register(Doubled, wrong, inputs=lambda _: torch.ones(3, dtype=torch.float64))
        assert "not that of the op" in torchkiln.replace(nn.Sequential(Doubled()))["0"].reason
    finally:
        torchkiln.replace.registry.entries.pop(Doubled)


class Language(nn.Module):
    """A model with a loss as Hugging Face's models have it."""

    def __init__(self, *, shifted: bool) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11)
        self.loss_function = self.shifted if shifted else self.plain

    @staticmethod
    def plain(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: int | None = None,
        ignore_index: int = -100,
    ) -> Tensor:
        loss = F.cross_entropy(
            logits.float().view(-1, vocab_size),
            labels.reshape(-1),
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss / (num_items_in_batch or 1)

    @staticmethod
    def shifted(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        labels = F.pad(labels, (0, 1), value=options.get("ignore_index", -100))[..., 1:]
        return Language.plain(logits, labels, **options)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("items", [None, 5])
def test_losses_of_language_models(shifted: bool, items: int | None) -> None:
    net = Language(shifted=shifted)
    before = net.loss_function
    report = torchkiln.replace(net)
    name = "causal_lm_loss" if shifted else "masked_lm_loss"
    assert report["loss_function"].now == f"{name} in the dtype of the logits"
    logits = torch.randn(2, 6, 11, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(11, (2, 6))
    given: dict[str, Any] = {
        "logits": logits,
        "labels": labels,
        "vocab_size": 11,
        "num_items_in_batch": items,
    }
    found, expected = net.loss_function(**given), before(**given)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (found, expected)]
    torch.testing.assert_close(*grads)
    report.undo()
    assert net.loss_function is before


def factory() -> nn.Module:
    """For the command line."""
    return nn.Sequential(Rms(8), nn.Linear(8, 8))


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    assert main(["replace", "test_replace:factory", "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("1 of 2 modules to replace (dry run)\n")
    assert (
        main(["replace", "test_replace:factory", "--exact", "--dtype", "bf16", "--json", "-"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["rows"][0]["was"] == "Rms"
    assert main(["replace", "test_replace:missing"]) == 2
    error = capsys.readouterr().err
    assert "MODULE:FACTORY: got 'test_replace:missing'" in error
    assert "expected a module and a function" in error
