"""``torchkiln.replace``: heads and losses of transformers' models."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from replace_models import GROUPED, SIZES, TOKENS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchkiln
from torchkiln.patch.source import logits as waiting

transformers = pytest.importorskip("transformers")

ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
BART = {
    "d_model": 32,
    "vocab_size": TOKENS,
    "max_position_embeddings": 64,
    **ENDS,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
GPT = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
SHORT = {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 1}
T5 = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", GROUPED),
    "tied": ("Llama", "ForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "mistral": ("Mistral", "ForCausalLM", GROUPED),
    "qwen2": ("Qwen2", "ForCausalLM", GROUPED),
    "qwen3": ("Qwen3", "ForCausalLM", {**GROUPED, "head_dim": 8}),
    "olmo2": ("Olmo2", "ForCausalLM", GROUPED),
    "phi3": ("Phi3", "ForCausalLM", GROUPED),
    "phi": ("Phi", "ForCausalLM", GROUPED),
    "gemma": ("Gemma", "ForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma2": (
        "Gemma2",
        "ForCausalLM",
        {**GROUPED, "head_dim": 8, "final_logit_softcapping": 0.5, "initializer_range": 0.2},
    ),
    "cohere": ("Cohere", "ForCausalLM", {**GROUPED, "logit_scale": 0.25}),
    "granite": ("Granite", "ForCausalLM", {**GROUPED, "logits_scaling": 8.0}),
    "mixtral": (
        "Mixtral",
        "ForCausalLM",
        {**GROUPED, "num_local_experts": 4, "output_router_logits": True},
    ),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", SIZES),
    "gpt2": ("GPT2", "LMHeadModel", {**GPT, **ENDS}),
    "gptj": ("GPTJ", "ForCausalLM", {**GPT, **ENDS, "rotary_dim": 4}),
    "bloom": ("Bloom", "ForCausalLM", {"vocab_size": TOKENS, "hidden_size": 32, "n_layer": 1}),
    "opt": (
        "OPT",
        "ForCausalLM",
        {**ENDS, "num_attention_heads": 4, "ffn_dim": 64, **SHORT},
    ),
    "mamba": ("Mamba", "ForCausalLM", {**SHORT, "state_size": 8}),
    "bert": ("Bert", "ForMaskedLM", SIZES),
    "bert decoder": ("Bert", "LMHeadModel", {**SIZES, "is_decoder": True}),
    "roberta": ("Roberta", "ForMaskedLM", SIZES),
    "electra": ("Electra", "ForMaskedLM", {**SIZES, "embedding_size": 32}),
    "albert": ("Albert", "ForMaskedLM", {**SIZES, "embedding_size": 16}),
    "modernbert": ("ModernBert", "ForMaskedLM", {**SIZES, "cls_token_id": 1, "sep_token_id": 2}),
    "t5": ("T5", "ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "bart": ("Bart", "ForConditionalGeneration", BART),
    "marian": ("Marian", "MTModel", BART),
}


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each loss that was computed without logits."""
    found: list[dict[str, Any]] = []

    def kept(*args: Any, **options: Any) -> Tensor:
        found.append(options)
        return torchkiln.linear_cross_entropy(*args, **options)

    monkeypatch.setattr(waiting, "linear_cross_entropy", kept)
    return found


def made(name: str) -> Any:
    family, head, settings = MODELS[name]
    if not hasattr(transformers, family + head):
        pytest.skip("this version of transformers has no such class")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, family + head)(config).eval()
    if isinstance(bias := getattr(model, "final_logits_bias", None), Tensor):
        bias.normal_()
    return model


def batch(**options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    tokens = torch.randint(3, TOKENS, (2, 12))
    labels = tokens.clone()
    labels[0, 5] = -100
    return {"input_ids": tokens, "labels": labels, **options}


def outcome(model: Any, **given: Any) -> list[Tensor]:
    """The loss, and its gradients with respect to the parameters."""
    loss = model(**given).loss
    leaves = [x for x in model.parameters() if x.requires_grad]
    found: Any = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [loss, *(x for x in found if x is not None)]


class Shapes(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Records the shapes of the results of all ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[torch.Size] = []

    def __torch_dispatch__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results: list[Any] = tree_leaves(result)
        self.found += [x.shape for x in results if isinstance(x, Tensor)]
        return result

    def has_logits(self) -> bool:
        """Whether a tensor has a row of all classes for each token."""
        tokens = 2 * 11
        return any(x[-1:] == (TOKENS,) and x.numel() // TOKENS in {tokens, 24} for x in self.found)


@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_logits_and_undo(name: str, losses: list[dict[str, Any]]) -> None:
    """Results in float64 agree with the original's, so the formula is the same."""
    model, given = made(name), batch()
    if name != "mixtral":  # torch has no grouped product in float64
        model.double()
    keys, cls = list(model.state_dict()), type(model)
    without = {"input_ids": given["input_ids"]}
    if model.config.is_encoder_decoder:
        without["decoder_input_ids"] = given["input_ids"]
    expected, logits, others = outcome(model, **given), model(**given).logits, model(**without)
    report = torchkiln.replace(model, head=True, only="loss")
    assert report[""].kind == "head", report
    shapes = Shapes()
    with shapes:
        found = outcome(model, **given)
    assert not shapes.has_logits()
    assert len(losses) == 1
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # the loss is float32
    output = model(**given)
    assert isinstance(OrderedDict.__getitem__(output, "logits"), waiting.Logits)
    assert torch.equal(output.logits, logits)
    unlabelled = model(**without)
    assert type(unlabelled) is type(others)
    assert torch.equal(unlabelled.logits, others.logits)
    assert list(model.state_dict()) == keys
    report.undo()
    assert type(model) is cls
    assert all(map(torch.equal, outcome(model, **given), expected))


def items() -> list[dict[str, Any]]:
    """Options of transformers' losses, one call each."""
    shifted = torch.randint(3, TOKENS, (2, 12))
    shifted[1, 4] = -100
    return [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(17)},
        {"shift_labels": shifted},
        {"ignore_index": 5, "labels": shifted.clamp_min(5)},
        {"logits_to_keep": 4, "labels": shifted[:, -4:]},
        {"labels": torch.full((2, 12), -100)},
    ]


@pytest.mark.parametrize("only", ["loss", "norm"], ids=["our loss", "their loss"])
@pytest.mark.parametrize("which", range(6))
def test_options_of_the_loss(only: Any, which: int, losses: list[dict[str, Any]]) -> None:
    model, given = made("llama"), batch(**items()[which])
    expected = outcome(model, **given)
    torchkiln.replace(model, head=True, only=only)
    for one, other in zip(outcome(model, **given), expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert len(losses) == 1


READS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda out: out.logits,
    "name": lambda out: out["logits"],
    "index": lambda out: out[1],
    "slice": lambda out: out[1:][0],
    "get": lambda out: out.get("logits"),
    "tuple": lambda out: out.to_tuple()[1],
    "items": lambda out: dict(out.items())["logits"],
    "values": lambda out: list(out.values())[1],
    "dict": lambda out: dict(out)["logits"],
    "unpacked": lambda out: {**out}["logits"],
    "leaves": lambda out: tree_leaves(out)[1],
    "copy": lambda out: copy.copy(out).logits,
    "pickle": lambda out: pickle.loads(pickle.dumps(out)).logits,
}


@pytest.mark.parametrize("how", READS)
def test_logits_are_computed_when_they_are_read(how: str) -> None:
    model, given = made("llama"), batch(use_cache=False)
    replaced = copy.deepcopy(model)
    torchkiln.replace(replaced, head=True, only="loss")
    with torch.no_grad():
        expected, found = model(**given), replaced(**given)
    assert list(found) == list(expected)
    assert (found.get("cache"), found.hidden_states) == (None, None)
    for loss in (found.loss, found["loss"], found[0], found[:1][0]):
        assert loss is found.loss
    assert isinstance(vars(found)["logits"], waiting.Logits)
    assert torch.equal(READS[how](found), expected.logits)
    assert type(found) is type(expected)
    assert repr(found) == repr(expected).replace(str(expected.loss), str(found.loss))


def test_logits_have_the_gradients_and_the_autocast_of_the_forward() -> None:
    model, given = made("gemma2"), batch()

    def grads(**options: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            found = model(**given, **options)
        with torch.no_grad():
            logits = found[1]
        total = found[0] + logits.float().square().sum()
        return [logits, *torch.autograd.grad(total, list(model.parameters()))]

    expected = grads()
    torchkiln.replace(model, head=True, only="loss")
    found = grads()
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, atol=0.02 * float(other.abs().max()), rtol=0.05)
    assert torch.equal(grads(return_dict=False)[0], expected[0])


def test_logits_after_a_step_of_the_optimizer() -> None:
    model, given = made("llama"), batch()
    torchkiln.replace(model, head=True)
    found, read = model(**given), model(**given)
    logits = read.logits.clone()
    found.loss.backward()
    torch.optim.SGD(model.parameters(), 1.0).step()
    assert torch.equal(read.logits, logits)
    with pytest.raises(RuntimeError, match=r"logits: got a head or an input that has changed"):
        _ = found.logits


def test_only_the_loss() -> None:
    """With head="loss" the logits are None in training mode."""
    model, given = made("llama").train(), batch(use_cache=False)
    expected = model(**given)
    torchkiln.replace(model, head="loss")
    found = model(**given)
    torch.testing.assert_close(found.loss, expected.loss)
    assert (found.logits, list(found)) == (None, ["loss"])
    assert len(model(**given, return_dict=False)) == 1


def test_the_trainer(tmp_path: Path) -> None:
    """The evaluation of transformers' Trainer gets logits also with head="loss"."""
    pytest.importorskip("accelerate")
    model, given = made("llama"), batch(use_cache=False)
    expected = model(**given)
    torchkiln.replace(model, head="loss", only="loss")
    settings = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = transformers.Trainer(model, settings)
    loss, logits, _ = trainer.prediction_step(model, dict(given), prediction_loss_only=False)
    torch.testing.assert_close(loss, expected.loss.detach())
    assert torch.equal(logits, expected.logits)


def test_texts_files_and_copies(tmp_path: Path, losses: list[dict[str, Any]]) -> None:
    model, given = made("roberta"), batch()
    decoder = made("llama")
    expected = outcome(model, **given)
    options = {"max_new_tokens": 5, "do_sample": False}
    text = decoder.generate(given["input_ids"], **options)
    torchkiln.replace(decoder, head=True)
    torchkiln.replace(model, head=True)
    assert torch.equal(decoder.generate(given["input_ids"], **options), text)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(outcome(other, **given), expected)
    assert len(losses) == 2
    model.save_pretrained(tmp_path)
    loaded = type(made("roberta")).from_pretrained(tmp_path)
    assert loaded.config.architectures == ["RobertaForMaskedLM"]
    assert all(map(torch.equal, outcome(loaded, **given), expected))


def test_losses_of_users(losses: list[dict[str, Any]]) -> None:
    """A model with its own loss is not replaced; a loss that is set later gets the logits."""

    def squares(logits: Tensor, **_: Any) -> Tensor:
        assert type(logits) is Tensor
        return logits.square().mean()

    model, given = made("llama"), batch()
    model.loss_function = squares
    expected = outcome(model, **given)
    report = torchkiln.replace(model, head=True)
    reason = "its loss_function is not that of transformers"
    assert report["linear_cross_entropy"].reason == reason
    model = made("llama")
    torchkiln.replace(model, head=True, only="loss")
    model.loss_function = squares
    torch.testing.assert_close(outcome(model, **given), expected)
    assert not losses


@pytest.mark.rotates("name", 3)
@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_graphs(name: str) -> None:
    """torch.compile makes one graph without logits; loss, logits and gradients are torch's."""
    model, given = made(name), batch()
    expected, logits = outcome(model, **given), model(**given).logits
    torchkiln.replace(model, head=True, only="loss")
    torch.compiler.reset()
    shapes: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            shapes.append(value.shape if isinstance(value, Tensor) else ())
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(outcome(compiled, **given), expected, rtol=1e-4, atol=1e-6)
    assert shapes
    assert not any(shape[-1:] == (TOKENS,) and len(shape) > 1 for shape in shapes)
    found: Any = compiled(**given)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found.logits, logits)
