"""replace(): its report, example, command, graphs, registered forwards and losses."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replace_models import Gated, Rms, model
from torch import Tensor, nn

import torchkiln
from torchkiln.cli import main


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
        "from",
        "float64",
        "outcome",
    ]
    assert second.startswith("2 ")
    assert second.endswith("replaced")
    assert third.endswith("kept: torch's product is as fast")
    assert last == "2 of 3 modules replaced; undo() of the report takes them back"
    assert repr(report) == str(report)
    assert report._repr_html_().startswith("<table><tr><th>modules</th>")
    assert json.loads(report.to_json()) == report.as_dict()
    assert report.as_dict()["schema"] == "torchkiln.replace/1"
    first_row, *_ = report.as_dict()["rows"]
    assert first_row["outcome"] == "replaced"
    assert first_row["error_ratio"] == first_row["error_now"] / first_row["error_was"]


def test_exact_batch_norms_are_refused() -> None:
    """exact=True would find no batch norm, so only="batch_norm" raises an error."""
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
    for row in (report["0"], report["1"]):
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
    """A model with a ``loss_function`` attribute, as in Hugging Face's models."""

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


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    assert main(["replace", "test_replace:factory"]) == 0
    assert capsys.readouterr().out.endswith("1 of 2 modules to replace (dry run)\n")
    assert main(["replace", "test_replace:factory", "--exact", "--dtype", "bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["was"] == "Rms"
    assert main(["replace", "test_replace:missing"]) == 2
    error = capsys.readouterr().err
    assert "MODULE:FACTORY: got 'test_replace:missing'" in error
    assert "expected a module and a function" in error


def test_the_command_makes_a_model_with_or_without_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run makes the model on the meta device, with --real on the CPU; its report is equal."""
    code = (
        "import torch\n"
        "def model():\n"
        "    net = torch.nn.Sequential(torch.nn.LayerNorm(8))\n"
        "    print(net[0].weight.device.type)\n"
        "    return net\n"
        "def values():\n"
        "    torch.ones(1).item()\n"
        "    return model()\n"
    )
    (tmp_path / "made_here.py").write_text(code)
    (tmp_path / "raises.py").write_text("raise RuntimeError('one line\\nand another')\n")
    monkeypatch.chdir(tmp_path)
    for flag, device in (([], "meta"), (["--meta"], "meta"), (["--real"], "cpu")):
        assert main(["replace", "made_here:model", *flag]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{device}\n")
        assert out.endswith("1 of 1 modules to replace (dry run)\n")
    assert main(["replace", "made_here:values", "--real"]) == 0
    capsys.readouterr()
    for factory, words in (
        ("made_here:values", "--real makes it outside of the meta device"),
        ("torch.nn:TransformerEncoderLayer", "got TypeError: "),
        ("raises:model", "RuntimeError: one line"),
    ):
        assert main(["replace", factory]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error


@pytest.mark.parametrize(
    ("given", "got"), [(5, "int"), (nn.Linear, "the class Linear"), (None, "NoneType")]
)
def test_what_is_no_model_is_named(given: Any, got: str) -> None:
    message = rf"^torchkiln\.replace: model: got {got}, expected a torch\.nn\.Module$"
    with pytest.raises(TypeError, match=message):
        torchkiln.replace(given)
