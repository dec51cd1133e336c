"""Attention of transformers' models after ``torchkiln.replace``, under ``torch.compile``."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from replace_models import GROUPED, TOKENS
from torch import Tensor, fx, nn

import torchkiln
from torchkiln.patch.attention import NAME, needs_none

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")

LENGTH, WINDOW = 12, 4
LAYERS = ["sliding_attention", "full_attention"]


def made(name: str, **sizes: Any) -> Any:
    """A small causal model in eval mode."""
    torch.manual_seed(0)
    if name == "GPT2":
        few = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        config = transformers.GPT2Config(vocab_size=TOKENS, **few, bos_token_id=1)
        return transformers.GPT2LMHeadModel(config).eval()
    if name == "Gemma3":
        given = {**GROUPED, "head_dim": 8, "layer_types": LAYERS, "sliding_window": 64, **sizes}
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**given)).eval()
    config = getattr(transformers, f"{name}Config")(**{**GROUPED, **sizes})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def tokens(length: int = LENGTH) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(2, TOKENS, (2, length))


class Compiled:
    """A compiled model; reports the masks of its calls of ``scaled_dot_product_attention``."""

    def __init__(self, model: nn.Module) -> None:
        torch.compiler.reset()
        self.graphs: list[fx.GraphModule] = []
        self.run: Any = torch.compile(model, backend=self.keep, fullgraph=True)

    def keep(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    def calls(self) -> list[str]:
        """For each call of the last graph, its mask: ``causal``, ``mask`` or ``all``."""
        name = "scaled_dot_product_attention"
        nodes = [node for node in self.graphs[-1].graph.nodes if name in str(node.target)]
        return [
            "mask"
            if node.kwargs["attn_mask"] is not None
            else "causal"
            if node.kwargs["is_causal"] is True
            else "all"
            for node in nodes
        ]


def training(model: Any, call: Any, **given: Any) -> list[Tensor]:
    """The logits, and the gradients of a cross entropy."""
    logits = call(**given).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), given["input_ids"].flatten())
    return [logits, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.rotates("cached", 2)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3", "Mistral", "GPT2"])
def test_causal_calls_get_no_mask(name: str, cached: bool) -> None:
    model = made(name)
    given = {"input_ids": tokens(), "use_cache": cached}
    expected = training(model, model, **given)
    report = torchkiln.replace(model, only="attention")
    assert report["attention"].outcome == "replaced"
    for one, other in zip(training(model, model, **given), expected, strict=True):
        assert torch.equal(one, other)
    compiled = Compiled(model)
    torch.testing.assert_close(training(model, compiled.run, **given), expected)
    assert compiled.calls() == ["causal", "causal"]
    longer = {"input_ids": tokens(LENGTH + 5), "use_cache": cached}  # sizes become dynamic
    torch.testing.assert_close(compiled.run(**longer).logits, model(**longer).logits)
    assert compiled.calls() == ["causal", "causal"]


def test_no_graph_has_the_size_of_a_mask() -> None:
    model = made("Llama")
    torchkiln.replace(model, only="attention")
    compiled = Compiled(model)
    compiled.run(input_ids=tokens(), use_cache=False)
    values = [node.meta.get("example_value") for node in compiled.graphs[-1].graph.nodes]
    shapes = {tuple(value.shape) for value in values if isinstance(value, Tensor)}
    assert not [shape for shape in shapes if shape[-2:] == (LENGTH, LENGTH)]


def test_a_transformers_that_never_skips_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of torch report every compilation as an export, so masks are not skipped."""
    monkeypatch.setattr(masking_utils, "is_torchdynamo_exporting", lambda: True, raising=False)
    model, bert = made("Llama"), transformers.BertModel(transformers.BertConfig(**GROUPED)).eval()
    for one in (model, bert):
        torchkiln.replace(one, only="attention")
    compiled = Compiled(model)
    torch.testing.assert_close(compiled.run(tokens()).logits, model(tokens()).logits)
    assert compiled.calls() == ["causal", "causal"]
    compiled = Compiled(bert)
    found = compiled.run(tokens()).last_hidden_state
    torch.testing.assert_close(found, bert(tokens()).last_hidden_state)
    assert compiled.calls() == ["all", "all"]


@pytest.mark.parametrize(("window", "cached"), [(WINDOW, False), (LENGTH, True), (13, False)])
def test_windows_that_are_too_short_keep_their_mask(window: int, cached: bool) -> None:
    model = made("Gemma3", sliding_window=window)
    given = {"input_ids": tokens(), "use_cache": cached}
    expected = model(**given).logits
    torchkiln.replace(model, only="attention")
    assert torch.equal(model(**given).logits, expected)
    compiled = Compiled(model)
    torch.testing.assert_close(compiled.run(**given).logits, expected)
    assert compiled.calls() == ["causal" if window > LENGTH else "mask", "causal"]


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :3] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def packed() -> dict[str, Any]:
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    return {"input_ids": tokens(), "position_ids": positions, "use_cache": False}


@pytest.mark.rotates("given", 2)
@pytest.mark.parametrize("given", [padded(), packed()], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GPT2"])
def test_padding_and_packed_sequences_keep_their_mask(name: str, given: dict[str, Any]) -> None:
    model = made(name, sliding_window=WINDOW) if name == "Gemma3" else made(name)
    expected = model(**given).logits
    plain = model(input_ids=given["input_ids"]).logits
    assert not torch.allclose(plain, expected, atol=1e-3)
    torchkiln.replace(model, only="attention")
    assert torch.equal(model(**given).logits, expected)
    compiled = Compiled(model)
    torch.testing.assert_close(compiled.run(**given).logits, expected)
    assert compiled.calls() == ["mask", "mask"]


@pytest.mark.rotates("name", 3)
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GPT2"])
def test_a_compiled_model_continues_from_a_cache(name: str) -> None:
    model = made(name, sliding_window=WINDOW) if name == "Gemma3" else made(name)
    expected = model(tokens(), use_cache=True).logits
    torchkiln.replace(model, only="attention")
    compiled = Compiled(model)
    found: list[Tensor] = []
    past: dict[str, Any] = {}
    for part in tokens().split([6, 1, 4, 1], dim=1):
        with torch.no_grad():
            result = compiled.run(part, use_cache=True, **past)
        past = {key: result[key] for key in ("past_key_values", "cache") if key in result}
        found.append(result.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("name", "is_compiled"), [("Llama", False), ("Llama", True), ("Gemma3", False)]
)
def test_generates_the_same_text(name: str, cache: str, is_compiled: bool) -> None:
    model = made(name, sliding_window=WINDOW) if name == "Gemma3" else made(name)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    inputs = padded()
    before = model.generate(**inputs, **options)
    report = torchkiln.replace(model, only="attention")
    assert report["attention"].changed
    if is_compiled:
        torch.compiler.reset()
        model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(**inputs, **options), before)


def test_settings_of_the_user_stay() -> None:
    for setting in ("eager", "flex_attention"):
        model = made("Llama", attn_implementation=setting)
        row = torchkiln.replace(model, only="attention")["attention"]
        assert row.reason == f"its attn_implementation is {setting}"
        assert model.config._attn_implementation == setting
    model = made("Llama")
    report = torchkiln.replace(model, only="attention")
    expected = model(tokens()).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(tokens()).logits, expected)
    report.undo()
    assert model.config._attn_implementation == "eager"


def test_skip_only_dry_run_and_undo() -> None:
    model = made("Llama")
    for options in (
        {"skip": ["attention"]},
        {"skip": lambda name, _: name == "attention"},
        {"only": "norm"},
        {"dry_run": True},
    ):
        report = torchkiln.replace(model, **options)
        assert model.config._attn_implementation == "sdpa"
        assert type(model.model) is transformers.LlamaModel
        report.undo()
    report = torchkiln.replace(model, skip=["model"])
    assert model.config._attn_implementation == NAME
    assert type(model.model) is transformers.LlamaModel
    assert torchkiln.replace(model)["attention"].reason == "is torchkiln's already"
    report.undo()
    keys = set(vars(model))
    report = torchkiln.replace(model, only="attention")
    assert [row.kind for row in report.changed] == ["attention", "attention"]
    assert report["model"].now == "its masks, without the positions that it counts"
    report.undo()
    assert model.config._attn_implementation == "sdpa"
    assert type(model.model) is transformers.LlamaModel
    assert set(vars(model)) == keys


def test_a_model_inside_of_others_and_a_shared_config() -> None:
    config = transformers.LlamaConfig(**GROUPED)
    model = nn.ModuleDict({name: transformers.LlamaModel(config) for name in "ab"})
    other = transformers.LlamaModel(config)
    report = torchkiln.replace(model, only="attention")
    assert [row.name for row in report.changed] == ["a", "b", "a.attention"]
    assert torchkiln.replace(other, only="attention")["attention"].changed


def test_names_outputs_copies_and_files(tmp_path: Path) -> None:
    model = made("Llama")
    expected = model(tokens(), output_hidden_states=True)
    torchkiln.replace(model, only="attention")
    for one in (model, copy.deepcopy(model), transformers.LlamaForCausalLM(model.config)):
        one.load_state_dict(model.state_dict())
        found = one.eval()(tokens(), output_hidden_states=True)
        assert torch.equal(found.logits, expected.logits)
        assert len(found.hidden_states) == len(expected.hidden_states) == 3
    model.model.save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    assert loaded.config.architectures == ["LlamaModel"]
    assert loaded.config._attn_implementation == "sdpa"
    model = made("Llama")  # a model that returned hidden states has hooks without a pickle
    torchkiln.replace(model, only="attention")
    torch.save((model, expected.logits), tmp_path / "model.pt")
    script = (
        "import sys, torch\n"
        "model, expected = torch.load(sys.argv[1], weights_only=False)\n"
        f"assert model.config._attn_implementation == {NAME!r}\n"
        f"torch.testing.assert_close(model(torch.tensor({tokens().tolist()})).logits, expected)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "model.pt")], check=True)


class Logits(nn.Module):
    """A model whose result is a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x, use_cache=True).logits
        return logits


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_that_of_sdpa(strict: bool) -> None:
    model = Logits(made("Llama"))
    before = torch.export.export(model, (tokens(),), strict=strict).graph_module.code
    torchkiln.replace(model, only="attention")
    assert torch.export.export(model, (tokens(),), strict=strict).graph_module.code == before


def test_models_that_depend_on_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    falcon = transformers.FalconModel(transformers.FalconConfig(vocab_size=TOKENS, **sizes))
    row = torchkiln.replace(falcon, only="attention")["attention"]
    assert row.reason.endswith("modeling_falcon compares the name of the implementation")
    doge = made("Doge")
    row = torchkiln.replace(doge, only="attention")["attention"]
    assert "modeling_doge" in row.reason
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping
    monkeypatch.setitem(functions, "sdpa", lambda *_, **__: None)
    row = torchkiln.replace(made("Llama"), only="attention")["attention"]
    assert row.reason == "another function is registered as sdpa"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"q_length": 1}, True),
        ({"q_length": 3}, False),
        ({"q_length": 3, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}, True),
        ({"allow_is_causal_skip": False}, False),
        ({"attention_mask": torch.ones(1, 4)}, False),
        ({"q_offset": torch.tensor(0)}, False),
        ({"local_size": 4}, False),
        ({"local_size": 4, "allow_is_bidirectional_skip": True}, False),
        ({"local_size": 5}, True),
    ],
)
def test_the_cases_without_a_mask_are_those_of_transformers(given: Any, expected: bool) -> None:
    options = {"batch_size": 1, "q_length": 4, "kv_length": 4, "device": "cpu", **given}
    assert needs_none(**options) == expected
    if expected:
        assert masking_utils.sdpa_mask(**options) is None


def test_transformers_is_not_imported() -> None:
    script = (
        "import sys, torch, torchkiln\n"
        "torchkiln.replace(torch.nn.Linear(2, 2))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
