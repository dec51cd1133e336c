"""The transformer block, compared with the same block in plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchkiln
from torchkiln.nn import KVCache, TransformerBlock
from torchkiln.nn.transformer import add_norm

DIM, HEADS, KV_HEADS, TOKENS, HIDDEN = 24, 6, 2, 7, 40
FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": "head"},
    "gpt2": {"norm": "layer", "bias": True, "gated": False, "act": "gelu_tanh"},
    "nemotron": {"norm": "layer", "bias": True, "gated": False, "act": "relu2", "offset": 1.0},
    "gemma": {"offset": 1.0, "act": "gelu_tanh", "post_norms": True, "qk_norm": "head"},
}
ACTS: dict[str, Any] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def make(form: str, **options: Any) -> TransformerBlock:
    torch.manual_seed(0)
    return TransformerBlock(DIM, HEADS, KV_HEADS, 4, HIDDEN, **FORMS[form], **options)


def rotation(form: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor | None, Tensor | None]:
    rotary = torchkiln.nn.RotaryEmbedding(4, TOKENS, dtype=dtype)
    return (None, None) if form == "gpt2" else (rotary.cos, rotary.sin)


def plain(block: TransformerBlock, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """The block in torch's ops, except attention, which has tests of its own."""

    def norm(layer: Any, x: Tensor) -> Tensor:
        if isinstance(layer, torchkiln.nn.LayerNorm):
            return F.layer_norm(x, (DIM,), layer.weight + layer.offset, layer.bias, layer.eps)
        scaled = x * (x.square().mean(-1, True) + layer.eps).rsqrt()
        return scaled * (layer.offset + layer.weight)

    y = block.attention(norm(block.attention_norm, x), cos, sin)
    x = x + (y if block.attention_post_norm is None else norm(block.attention_post_norm, y))
    y, mlp, act = norm(block.mlp_norm, x), block.mlp, ACTS[block.mlp.act]
    if isinstance(mlp, torchkiln.nn.GatedMLP):
        gate, up = F.linear(y, mlp.gate_up.weight, mlp.gate_up.bias).chunk(2, -1)
        y = act(gate) * up
    else:
        y = act(F.linear(y, mlp.up.weight, mlp.up.bias))
    y = F.linear(y, mlp.down.weight, mlp.down.bias)
    return x + (y if block.mlp_post_norm is None else norm(block.mlp_post_norm, y))


@pytest.mark.parametrize("form", FORMS)
def test_results_and_gradients(form: str) -> None:
    blocks = [make(form, dtype=torch.float64) for _ in range(2)]
    cos, sin = rotation(form, torch.float64)
    start = torch.randn(2, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    x, expected = start, start
    residual: Any = None
    for block in blocks:
        x, residual = block(x, residual, cos, sin)
        expected = plain(block, expected, cos, sin)
    y = x + residual
    torch.testing.assert_close(y, expected)
    leaves = [start, *(p for block in blocks for p in block.parameters())]
    grad = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, leaves, grad), torch.autograd.grad(expected, leaves, grad)
    )


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_norm_of_a_sum_has_the_settings_of_its_module(norm: Literal["rms", "layer"]) -> None:
    block = TransformerBlock(DIM, HEADS, norm=norm, offset=1.0, round="input", dtype=torch.bfloat16)
    torch.nn.init.normal_(block.mlp_norm.weight)
    x, residual = torch.randn(2, 5, DIM, dtype=torch.bfloat16)
    y, total = add_norm(block.mlp_norm, x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, block.mlp_norm(total))
    block.mlp_norm.round = "once"
    assert not torch.equal(y, block.mlp_norm(total))


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_compiled_and_checkpointed(form: str) -> None:
    block = make(form).bfloat16()
    cos, sin = rotation(form)
    x = torch.randn(2, TOKENS, DIM).bfloat16().requires_grad_()
    residual = torch.randn(2, TOKENS, DIM).bfloat16()
    y, total = block(x, residual, cos, sin)
    (grad,) = torch.autograd.grad((y + total).sum(), x)
    compiled: Any = torch.compile(block, backend="aot_eager", fullgraph=True)
    again: Any = partial(checkpoint, block, use_reentrant=False)
    for call in (compiled, again):
        ours, sums = call(x, residual, cos, sin)
        torch.testing.assert_close((ours, sums), (y, total))
        torch.testing.assert_close(torch.autograd.grad((ours + sums).sum(), x)[0], grad)
    wide = make(form, dtype=torch.float64)
    wide.load_state_dict(block.state_dict())
    double = [None if t is None else t.double() for t in (cos, sin)]
    truth = plain(wide, x.double() + residual.double(), *double)
    torch.testing.assert_close((y + total).double(), truth, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_decoding_from_the_cache(form: str) -> None:
    block = make(form)
    cos, sin = rotation(form)
    x = torch.randn(2, TOKENS, DIM)
    cache = KVCache(2, TOKENS, KV_HEADS, 4)
    with torch.no_grad():
        expected = sum(block(x, None, cos, sin))
        found = [
            sum(block(x[:, at], None, cos, sin, cache=cache, positions=at))
            for at in torch.arange(TOKENS).split(1)
        ]
    torch.testing.assert_close(torch.cat(found, 1), expected)


def test_dropout_drops_in_training_only() -> None:
    block = make("llama", dropout=1.0)
    x = torch.randn(2, TOKENS, DIM)
    y, residual = block(x)
    assert not y.any()
    assert torch.equal(residual, x)
    assert block.eval()(x)[0].any()


def test_state_dict_and_refusals() -> None:
    assert list(make("llama").state_dict()) == [
        "attention_norm.weight",
        "attention.qkv.weight",
        "attention.out.weight",
        "mlp_norm.weight",
        "mlp.gate_up.weight",
        "mlp.down.weight",
    ]
    with pytest.raises(ValueError, match=r"norm: got 'batch', expected 'rms' or 'layer'"):
        TransformerBlock(DIM, HEADS, norm="batch")  # type: ignore[arg-type]
