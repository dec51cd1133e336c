"""``torch.compile(model, backend="torchkiln")`` on small models of transformers."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from replace_models import GROUPED, SIZES, TOKENS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchkiln.patch.compiled.backend import backend
from torchkiln.patch.compiled.choice import Choice, note, table_of, timed
from torchkiln.patch.table import SHIPPED

transformers = pytest.importorskip("transformers")

RESULTS = Path(__file__).parents[2] / "docs" / "results"

DROPOUTS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def without_compiled_code() -> Iterator[None]:
    """Dynamo would count graphs of earlier tests towards its limit of recompilations."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def llama() -> nn.Module:
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    return model


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**GROUPED, head_dim=8)
    model: nn.Module = transformers.Qwen3ForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    others = {"bos_token_id": 1, "eos_token_id": None, "loss_type": "ForCausalLM"}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(vocab_size=TOKENS, **sizes, **others, **dropouts)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def bert() -> nn.Module:
    model: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **DROPOUTS))
    return model


def vit() -> nn.Module:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size")}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    model: nn.Module = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, **heads, **DROPOUTS)
    )
    return model


MODELS = {
    llama: {"add_rms_norm": 4, "rms_norm": 1, "swiglu": 2, "rope": 2, "cross_entropy": 1},
    qwen3: {"add_rms_norm": 4, "rms_norm": 5, "swiglu": 2, "rope": 2, "cross_entropy": 1},
    gpt2: {"add_layer_norm": 4, "layer_norm": 1, "gelu_tanh": 2, "cross_entropy": 1},
    bert: {"add_layer_norm": 4, "layer_norm": 2, "linear": 3, "cross_entropy": 1},
    vit: {"add_layer_norm": 4, "layer_norm": 1, "linear": 2, "cross_entropy": 1},
}
"""The ops that the graph of a training step contains, by model."""


def batch(make: Any, length: int = 7, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    if make is vit:
        return {"pixel_values": torch.randn(2, 3, 16, 16, dtype=dtype), "labels": torch.arange(2)}
    ids = torch.randint(1, TOKENS, (2, length))
    return {"input_ids": ids, "labels": ids} | ({} if make is bert else {"use_cache": False})


def step(model: Any, given: dict[str, Any], parameters: Any) -> dict[str, Tensor]:
    """Loss, logits, and the gradients of all parameters as one vector."""
    out = model(**given)
    found = torch.autograd.grad(out.loss, list(parameters), materialize_grads=True)
    flat = torch.cat([x.flatten() for x in found])
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), "gradients": flat}


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def ops_in(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """The names of ops in the backend's log."""
    found: dict[str, int] = {}
    for record in caplog.records:
        words = record.getMessage()
        if record.name == "torchkiln.compile" and words != "no op found":
            for part in words.split(", "):
                count, name = part.split()
                found[name] = found.get(name, 0) + int(count)
    return found


@pytest.mark.rotates("dtype", 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_step_is_as_close_to_float64_as_in_eager(
    make: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = make().to(dtype)
    given = batch(make, dtype=dtype)
    wide = copy.deepcopy(model).double()
    exact = given | {k: v.double() for k, v in given.items() if k == "pixel_values"}
    truth = step(wide, exact, wide.parameters())
    was = step(model, given, model.parameters())
    caplog.set_level(logging.INFO, "torchkiln.compile")
    compiled = torch.compile(
        model, backend=backend, options={"then": "eager"}, fullgraph=make is not gpt2
    )
    now = step(compiled, given, model.parameters())
    assert ops_in(caplog) == MODELS[make]
    for name, true in truth.items():
        assert now[name].dtype == was[name].dtype
        limit = max(2 * error(was[name], true), torch.finfo(dtype).eps)
        assert error(now[name], true) <= limit, name


def test_other_lengths_need_one_more_graph() -> None:
    torch.manual_seed(0)
    model = llama()
    graphs = 0

    def counted(module: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return backend(module, inputs, options={"then": "eager"})

    compiled = torch.compile(model, backend=counted, fullgraph=True)
    for length in (7, 12, 33, 20, 48):
        given = batch(llama, length)
        expected = step(model, given, model.parameters())
        found = step(compiled, given, model.parameters())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert graphs == 2


def test_logits_that_nobody_reads_are_not_made(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = llama()
    given = batch(llama)
    caplog.set_level(logging.INFO, "torchkiln.compile")

    @torch.compile(backend=backend, options={"then": "eager"}, fullgraph=True)
    def loss() -> Tensor:
        found: Tensor = model(**given).loss
        return found

    expected = step(model, given, model.parameters())
    found = loss()
    assert ops_in(caplog)["linear_cross_entropy"] == 1
    torch.testing.assert_close(found, expected["loss"])
    flat = [x.flatten() for x in torch.autograd.grad(found, list(model.parameters()))]
    torch.testing.assert_close(torch.cat(flat), expected["gradients"], rtol=1e-4, atol=1e-6)


def test_a_mode_gets_its_own_graph(caplog: pytest.LogCaptureFixture) -> None:
    """In training BERT gets other ops, because dropouts lie between its layers and sums."""
    torch.manual_seed(0)
    model: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    given = batch(bert)
    compiled: Any = torch.compile(model, backend=backend, options={"then": "eager"})
    caplog.set_level(logging.INFO, "torchkiln.compile")
    compiled(**given)
    assert ops_in(caplog)["add_layer_norm"] == 4
    model.eval()
    expected = model(**given)
    torch.testing.assert_close(compiled(**given).logits, expected.logits)


def test_inductor_compiles_the_ops(caplog: pytest.LogCaptureFixture) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.norm, self.head = (
                nn.Linear(16, 16),
                nn.RMSNorm(16, 1e-6),
                nn.Linear(16, 9),
            )

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            x = self.norm(x + self.mix(x))
            logits = self.head(nn.functional.silu(x) * x.flip(-1))
            return nn.functional.cross_entropy(logits.view(-1, 9), target)

    torch.manual_seed(0)
    layer, x, target = Layer(), torch.randn(3, 4, 16), torch.arange(12) % 9
    expected = step_of(layer, x, target)
    caplog.set_level(logging.INFO, "torchkiln.compile")
    ops = ["add_rms_norm", "swiglu", "linear_cross_entropy"]
    options: Any = {"ours": ops, "cpp_wrapper": False}
    compiled = torch.compile(layer, backend=backend, options=options)
    torch.testing.assert_close(step_of(compiled, x, target), expected)
    assert ops_in(caplog) == dict.fromkeys(ops, 1)


def step_of(layer: Any, x: Tensor, target: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    loss = layer(x, target)
    return [loss.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])]


def test_torch_finds_the_backend() -> None:
    (point,) = entry_points(group="torch_dynamo_backends", name="torchkiln")
    assert point.load() is backend
    assert "torchkiln" in torch.compiler.list_backends()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"than": "eager"}, "options: got 'than', expected one of then, ours, table, or an option"),
        ({"then": "eager", "max_autotune": True}, "options: got 'max_autotune', expected one of"),
        ({"then": "onnx"}, "then: got 'onnx', expected 'inductor' or 'eager'"),
        ({"ours": ["rms"]}, "ours: got 'rms', expected ops of rms_norm, "),
        ({"table": "none.json"}, "table: got none.json (FileNotFoundError"),
    ],
)
def test_errors_name_the_option(options: dict[str, Any], words: str) -> None:
    compiled = torch.compile(lambda x: x + 1, backend=backend, options=options)
    with pytest.raises(Exception, match=r"torchkiln\.compile") as found:
        compiled(torch.ones(2))
    assert words in str(found.value)


def test_the_shipped_table_is_that_of_the_results() -> None:
    runs = [
        json.loads((RESULTS / f"h100{name}.json").read_text()) for name in ("", "_layers", "_rows")
    ]
    rows = [row for run in runs for row in run["rows"]]
    assert table_of({**runs[0], "rows": rows}) == json.loads(SHIPPED.read_text())


def test_an_explanation_has_times_only_of_ops_that_a_graph_can_get() -> None:
    with FakeTensorMode():
        x = torch.empty(8, 4096, dtype=torch.bfloat16, device="cuda")
    words = 'torch.compile(backend="torchkiln") chooses '
    assert note("cross_entropy", [x]).startswith(f"{words}this op: ")
    assert note("swiglu", [x]).startswith(f"{words}torch's ops: ")
    assert not note("softmax", [x])  # measured, but no graph had it
    assert "rows of 1024 took " in note("add_rms_norm", [x])
    borrowed = note("rms_norm", [x])
    assert "rows of 1024 in add_rms_norm, which has the same kernels, took " in borrowed


def test_the_table_chooses(tmp_path: Path) -> None:
    x = torch.empty(1, 4000, dtype=torch.bfloat16, device="meta")
    rows = {op: timed(SHIPPED, op, x) for op in ("swiglu", "rope", "rms_norm", "sin")}
    assert {op: row and row.is_ours for op, row in rows.items()} == {
        "swiglu": False,
        "rope": True,
        "rms_norm": True,  # uses the times of add_rms_norm
        "sin": None,
    }
    times = {"kind": "calls", "op": "swiglu", "dtype": "float32"}
    seconds = {
        (64, "forward"): (1.0, 1.5),
        (64, "backward"): (2.0, 1.7),
        (4096, "forward"): (1.0, 1.0),
        (4096, "backward"): (2.0, 2.0),
        (9, "forward"): (1.0, 9.0),
    }
    run = [
        times
        | {"shape": [8, columns], "direction": direction}
        | {"times": {"torchkiln": {"seconds": ours}, "compile": {"seconds": compiled}}}
        for (columns, direction), (ours, compiled) in seconds.items()
    ]
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table_of({"environment": {}, "rows": run})))
    choice = Choice(table=file)
    assert choice("swiglu", torch.empty(3, 100))
    assert not choice("swiglu", torch.empty(3, 3000))
    assert not choice("swiglu", torch.empty(3, 100, dtype=torch.bfloat16))
    assert not Choice()("swiglu", torch.empty(3, 100))  # nothing was measured on a CPU


def test_a_variant_has_a_row_of_its_own() -> None:
    call = {"kind": "calls", "dtype": "float32", "shape": [8, 64]}
    times = {"torchkiln": {"seconds": 1.0}, "compile": {"seconds": 2.0}}
    run = [
        call | {"op": op, "variant": variant, "direction": direction, "times": times}
        for op, variant in (("linear", "padded"), ("linear", ""), ("group_norm", "padded"))
        for direction in ("forward", "backward")
    ]
    found = table_of({"environment": {}, "rows": run})["rows"]
    assert [row["op"] for row in found] == ["linear", "padded_linear"]
