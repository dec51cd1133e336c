"""``torchkiln.replace`` on the models of Hugging Face, small and with random parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from replace_models import GROUPED, SIZES, TOKENS
from torch import Tensor, nn

import torchkiln

transformers = pytest.importorskip("transformers")

NORM = "rms_norm(round=input)"
SUM = "add_rms_norm at post_attention_layernorm"
ROPE = {"rope": 2, "cos and sin for rope": 1}


def causal(name: str, **sizes: Any) -> nn.Module:
    """A causal language model of a family."""
    config = getattr(transformers, f"{name}Config")(**sizes)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    ends = {"bos_token_id": 1, "eos_token_id": None}
    model: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=TOKENS, **sizes, **ends)
    )
    return model


def bert() -> nn.Module:
    model: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    return model


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model: nn.Module = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=TOKENS, **sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0
        )
    )
    return model


def vit() -> nn.Module:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size")}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4}
    model: nn.Module = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, **heads, image_size=16, patch_size=4)
    )
    return model


def clip() -> nn.Module:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size")}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4}
    tower = transformers.CLIPVisionConfig(**sizes, **heads, image_size=16, patch_size=4)
    model: nn.Module = transformers.CLIPForImageClassification(
        transformers.CLIPConfig(vision_config=tower.to_dict(), num_labels=2)
    )
    return model


def mamba2() -> nn.Module:
    sizes = {"hidden_size": 32, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2}
    return causal("Mamba2", vocab_size=TOKENS, num_hidden_layers=2, chunk_size=8, **sizes)


Mamba2Norm: Any = transformers.models.mamba2.modeling_mamba2.MambaRMSNormGated
GROUPS = ", groups=2" if "group_size" in inspect.signature(Mamba2Norm).parameters else ""
"""Empty for older versions of transformers, whose norm has no groups."""

MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "llama": (
        lambda: causal("Llama", **GROUPED),
        {NORM: 5, "swiglu between the projections": 2, SUM: 2, **ROPE},
    ),
    "qwen3": (
        lambda: causal("Qwen3", **GROUPED, head_dim=8),
        {NORM: 9, "swiglu between the projections": 2, SUM: 2, **ROPE},
    ),
    "gemma3": (
        lambda: transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(**GROUPED, head_dim=8)
        ),
        {
            "rms_norm(offset=1)": 13,
            "geglu_tanh between the projections": 2,
            "add_rms_norm at pre_feedforward_layernorm": 2,
            **ROPE,
        },
    ),
    "mistral": (
        lambda: causal("Mistral", **GROUPED),
        {NORM: 5, "swiglu between the projections": 2, SUM: 2, **ROPE},
    ),
    "phi3": (
        lambda: causal("Phi3", **GROUPED),
        {
            NORM: 5,
            "swiglu between the projections": 2,
            f"dropout_add at resid_attn_dropout, {SUM}": 2,
            **ROPE,
        },
    ),
    "mixtral": (
        lambda: causal("Mixtral", **GROUPED, num_local_experts=4),
        {NORM: 5, SUM: 2, **ROPE},
    ),
    "gpt2": (gpt2, {"layer_norm": 5, "gelu_tanh": 2, "add_layer_norm at ln_2": 2}),
    "bert": (
        bert,
        {
            "layer_norm": 6,
            "gelu": 3,
            "add_layer_norm at LayerNorm": 1,
            "dropout_add at dropout, add_layer_norm at LayerNorm": 4,
            "linear(gelu) at dense": 3,
            "cross_entropy": 1,
        },
    ),
    "arcee": (
        lambda: causal("Arcee", **GROUPED),
        {NORM: 5, "relu2": 2, SUM: 2, "linear(relu2) at up_proj": 2, **ROPE},
    ),
    "clip": (
        clip,
        {
            "layer_norm": 6,
            "quick_gelu": 2,
            "add_layer_norm at layer_norm2": 2,
            "linear(quick_gelu) at fc1": 2,
        },
    ),
    "t5": (t5, {NORM: 12, "geglu_tanh between the projections": 4, "cross_entropy": 1}),
    "vit": (
        vit,
        {
            "layer_norm": 5,
            "gelu": 2,
            "dropout_add at dropout, add_layer_norm at layernorm_after": 2,
            "linear(gelu) at fc1": 2,
        },
    ),
    "mamba2": (
        mamba2,
        {"rms_norm(round=input)": 3, f"gated_rms_norm(gate_first=True{GROUPS})": 2},
    ),
}


def batch(name: str) -> dict[str, Tensor]:
    """The arguments of a call, with labels for the loss."""
    torch.manual_seed(1)
    if name in ("vit", "clip"):
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    tokens = torch.randint(2, TOKENS, (2, 12))
    return {"input_ids": tokens, "labels": tokens}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


@pytest.mark.parametrize("name", MODELS)
def test_results_gradients_copies_and_undo(name: str, tmp_path: Path) -> None:
    model, given = made(name), batch(name)
    keys = list(model.state_dict())

    def outcome() -> tuple[Tensor, list[Tensor | None]]:
        result = model(**given)
        leaves = [x for x in model.parameters() if x.requires_grad]
        return result.logits, list(torch.autograd.grad(result.loss, leaves, allow_unused=True))

    logits, grads = outcome()
    report = torchkiln.replace(model)
    counts: dict[str, int] = {}
    for row in report.changed:
        if row.name != "loss_function" and row.kind != "attention":
            counts[row.now] = counts.get(row.now, 0) + 1
    assert counts == MODELS[name][1]
    found, found_grads = outcome()
    torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-4)
    largest = max(float(x.abs().max()) for x in grads if x is not None)
    for one, other in zip(found_grads, grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:  # zeros, as of key biases, are rounded
            torch.testing.assert_close(one, other, atol=1e-5 * largest, rtol=1e-3)
    assert torch.equal(copy.deepcopy(model)(**given).logits, found)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**given).logits, found, atol=1e-5, rtol=1e-4)
    assert list(model.state_dict()) == keys
    report.undo()
    undone, undone_grads = outcome()
    assert torch.equal(undone, logits)
    for one, other in zip(undone_grads, grads, strict=True):
        assert other is None if one is None else other is not None and torch.equal(one, other)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generates_the_same_text(name: str, cache: str | None) -> None:
    model: Any = made(name)
    tokens = batch(name)["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    before = model.generate(tokens, **options)
    torchkiln.replace(model)
    assert torch.equal(model.generate(tokens, **options), before)


def test_loss_counts_items_as_the_trainer_does() -> None:
    model, given = made("llama"), batch("llama")
    options = {**given, "num_items_in_batch": 40}
    before = model(**options).loss
    torchkiln.replace(model, only="loss")
    torch.testing.assert_close(model(**options).loss, before)


def test_compiles_a_replaced_llama() -> None:
    model, given = made("llama"), batch("llama")
    torchkiln.replace(model)
    expected = model(**given).logits
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given).logits, expected)


def test_a_dry_run_needs_no_memory() -> None:
    with torch.device("meta"):
        model = causal("Llama", **{**GROUPED, "hidden_size": 4096, "intermediate_size": 14336})
    report = torchkiln.replace(model, dry_run=True)
    assert len(report.changed) == 15
