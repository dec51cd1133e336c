"""``torchkiln.replace``: rotary position embeddings of transformers' models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replace_models import GROUPED, SIZES
from torch import Tensor

import torchkiln
from torchkiln.patch.formula import rotation

SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

MODELS: dict[str, tuple[dict[str, Any], tuple[int, bool, str, bool, bool]]] = {
    "Llama": (GROUPED, (-3, False, "halves", False, False)),
    "Qwen2": (GROUPED, (-3, False, "halves", False, False)),
    "Qwen3": ({**GROUPED, "head_dim": 8}, (-3, False, "halves", False, False)),
    "Gemma": ({**GROUPED, "head_dim": 8}, (-3, False, "halves", False, False)),
    "GPTNeoX": ({**SIZES, "rotary_pct": 0.5}, (-3, False, "halves", True, True)),
    "Glm": ({**GROUPED, "head_dim": 8}, (-3, True, "first", True, True)),
    "Cohere": (GROUPED, (-3, True, "neighbours", False, False)),
}
"""Settings, and dimension of the heads, order, columns of cos, part and layout of the rotation."""


def causal(name: str, settings: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records the form of each rotation that the op computes in a replaced forward."""
    found: list[tuple[Any, ...]] = []
    rotated = rotation.Rotation.rotated

    def kept(self: rotation.Rotation, *args: Tensor) -> tuple[Tensor, Tensor]:
        found.append((*self.form, self.is_partial, self.is_dense))
        return rotated(self, *args)

    monkeypatch.setattr(rotation.Rotation, "rotated", kept)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_models_with_caches_and_checkpoints(name: str, forms: list[tuple[Any, ...]]) -> None:
    settings, form = MODELS[name]
    model = causal(name, settings)
    tokens = torch.randint(2, 99, (2, 12))
    options = {"max_new_tokens": 6, "do_sample": False}
    caches = (None, "static")

    def outcome() -> list[Tensor]:
        found = model(tokens, labels=tokens)
        found.loss.backward()
        gradients = [x.grad for x in model.parameters()]
        model.zero_grad()
        return [found.logits.detach(), *gradients]

    def texts() -> list[Tensor]:
        return [model.generate(tokens, cache_implementation=c, **options) for c in caches]

    expected, expected_texts = outcome(), texts()
    report = torchkiln.replace(model, only="rope")
    assert [row.now for row in report.changed].count("rope") == 2
    for checkpoints in (False, True):
        if checkpoints:
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)()
            model.train()
        forms.clear()
        for one, other in zip(outcome(), expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        assert forms == [form] * (4 if checkpoints else 2)
    model.eval()
    forms.clear()
    assert all(map(torch.equal, texts(), expected_texts))
    assert len(forms) == 2 * 2 * 6
    report.undo()
    assert torch.equal(outcome()[0], expected[0])


def test_rotations_by_several_positions_stay() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen2VLTextConfig"):
        pytest.skip("this version of transformers has no such class")
    config = transformers.Qwen2VLTextConfig(**GROUPED, rope_parameters=SECTIONS)
    torch.manual_seed(0)
    model = transformers.Qwen2VLTextModel(config).eval()
    tokens = torch.randint(2, 99, (2, 12))
    expected = model(tokens).last_hidden_state
    report = torchkiln.replace(model, only="rope")
    assert not report.changed
    assert report["layers.0.self_attn"].reason.startswith("no module is known to make cos and sin")
    assert torch.equal(model(tokens).last_hidden_state, expected)


def test_other_orders_of_elements_stay() -> None:
    """DeepSeek-V3's rotation reads adjacent pairs and writes halves, so it is not replaced."""
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "n_routed_experts": 4}
    model = causal("DeepseekV3", {**GROUPED, **ranks, **heads, "n_group": 1, "topk_group": 1})
    reasons = {row.reason for row in torchkiln.replace(model).rows if row.kind == "rope"}
    assert reasons == {"apply_rotary_pos_emb_interleave: it computes another formula"}
