"""Attention and its cache, compared with the same computation in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torchkiln
from torchkiln.nn import Attention, KVCache

DIM, HEADS, KV_HEADS, HEAD = 24, 6, 2, 8
TOKENS = 7


def tables(tokens: int, **options: Any) -> tuple[Tensor, Tensor]:
    rotary = torchkiln.nn.RotaryEmbedding(HEAD, tokens, **options)
    return rotary.cos, rotary.sin


def plain(
    layer: Attention, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None = None
) -> Tensor:
    """The documented formula in torch's ops, with softmax written out."""
    sizes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    qkv = F.linear(x, layer.qkv.weight, layer.qkv.bias)
    q, k, v = qkv.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2).split(sizes, 1)
    if layer.q_norm is not None and layer.k_norm is not None:
        over = (1, -1) if layer.qk_norm == "all" else -1
        q, k = (
            t
            * (t.square().mean(over, True) + layer.eps).rsqrt()
            * (layer.offset + norm.weight.view(-1, 1, layer.head_dim))
            for t, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
    if rope is not None:
        cos, sin = (torch.cat([t, t], -1).to(x.dtype) for t in rope)
        q, k = (
            t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k)
        )
    k, v = (t.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for t in (k, v))
    scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    scores = q @ k.transpose(-1, -2) * scale
    tokens = torch.arange(x.shape[1], device=x.device)
    far = tokens[:, None] - tokens
    if layer.causal:
        scores = scores.masked_fill(far < 0, float("-inf"))
    if layer.window is not None:
        scores = scores.masked_fill(far >= layer.window, float("-inf"))
    if mask is not None:
        boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if boolean else scores + mask
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    return F.linear(mixed, layer.out.weight, layer.out.bias)


FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "all heads": {"num_kv_heads": HEADS, "bias": True},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "all"},
    "gemma": {"qk_norm": "head", "offset": 1.0, "scale": 0.3, "window": 3},
    "encoder": {"causal": False, "bias": True, "out_bias": False},
}


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_results_and_gradients(form: str, rotated: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD} | FORMS[form]
    layer = Attention(DIM, HEADS, **options, dtype=torch.float64, device=device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    rope = None
    if rotated:
        cos, sin = (t.to(device) for t in tables(TOKENS, dtype=torch.float64))
        rope = (cos, sin)
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64, device=device, requires_grad=True)
    y, expected = layer(x, *(rope or ())), plain(layer, x, rope)
    torch.testing.assert_close(y, expected)
    leaves = [x, *layer.parameters()]
    grad = torch.randn_like(y)
    ours = torch.autograd.grad(y, leaves, grad)
    theirs = torch.autograd.grad(expected, leaves, grad)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("form", ["llama", "gemma", "encoder"])
@pytest.mark.parametrize("kind", ["bool", "number"])
def test_a_mask_applies_as_well(form: str, kind: str) -> None:
    options: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD} | FORMS[form]
    layer = Attention(DIM, HEADS, **options, dtype=torch.float64)
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    mask = torch.rand(2, 1, TOKENS, TOKENS) < 0.7
    mask |= torch.eye(TOKENS, dtype=torch.bool)
    given = mask if kind == "bool" else torch.randn(mask.shape, dtype=torch.float64)
    torch.testing.assert_close(layer(x, mask=given), plain(layer, x, None, given))


def test_bfloat16_is_close_to_the_truth(device: torch.device) -> None:
    torch.manual_seed(0)
    layer = Attention(DIM, HEADS, KV_HEADS, HEAD, qk_norm="head", device=device)
    x = torch.randn(2, TOKENS, DIM, device=device).bfloat16()
    cos, sin = (t.to(device) for t in tables(TOKENS))
    layer.bfloat16()
    y = layer(x, cos, sin)
    truth = plain(layer.double(), x.double(), (cos.double(), sin.double()))
    torch.testing.assert_close(y.double(), truth, rtol=0.03, atol=0.02)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", ["llama", "all heads", "olmo2", "gemma"])
def test_decoding_from_the_cache_is_the_full_forward(
    form: str, compiled: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD} | FORMS[form]
    layer = Attention(DIM, HEADS, **options, device=device)
    x = torch.randn(2, TOKENS, DIM, device=device)
    cos, sin = (t.to(device) for t in tables(TOKENS))
    cache = KVCache(2, TOKENS + 3, layer.num_kv_heads, HEAD, device=device)
    step: Any = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    first = 4
    with torch.no_grad():
        expected = layer(x, cos, sin)
        parts = [layer(x[:, :first], cos[:first], sin[:first], cache=cache)]
        for token in range(first, TOKENS):
            at = torch.tensor([token], device=device)
            parts.append(step(x[:, token : token + 1], cos, sin, cache=cache, positions=at))
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    cache.reset()
    assert not cache.keys.any()
    with torch.no_grad():  # several tokens at given positions
        two = [
            layer(x[:, at], cos, sin, cache=cache, positions=at)
            for at in torch.arange(TOKENS, device=device).split(4)
        ]
    torch.testing.assert_close(torch.cat(two, 1), expected)


@pytest.mark.parametrize("form", ["llama", "gemma"])
def test_sequences_of_different_lengths(form: str, device: torch.device) -> None:
    """Sequences have different positions; the padding of the shorter prompt is masked."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD} | FORMS[form]
    layer = Attention(DIM, HEADS, **options, device=device)
    x = torch.randn(2, TOKENS, DIM, device=device)
    cos, sin = (t.to(device) for t in tables(TOKENS))
    cache = KVCache(2, TOKENS, KV_HEADS, HEAD, device=device)
    prompts = torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1]], device=device)
    with torch.no_grad():
        expected = layer(x, cos, sin)
        found = layer(x[:, :4], cos, sin, cache=cache, positions=prompts)
        torch.testing.assert_close(found[0], expected[0, :4])
        torch.testing.assert_close(found[1, :2], expected[1, :2])
        for step in range(3):
            at = torch.tensor([[4 + step], [2 + step]], device=device)
            token = x[torch.arange(2), at[:, 0].cpu()][:, None]
            found = layer(token, cos, sin, cache=cache, positions=at)
            torch.testing.assert_close(found[:, 0], expected[torch.arange(2), at[:, 0].cpu()])


@pytest.mark.parametrize("batched", [False, True])
def test_a_cache_without_rotation(batched: bool) -> None:
    layer = Attention(DIM, HEADS, KV_HEADS, HEAD, dtype=torch.float64)
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    cache = KVCache(2, TOKENS, KV_HEADS, HEAD, dtype=torch.float64)
    with torch.no_grad():
        found = [
            layer(x[:, at], cache=cache, positions=at.expand(2, -1) if batched else at)
            for at in torch.arange(TOKENS).split(3)
        ]
        torch.testing.assert_close(torch.cat(found, 1), plain(layer, x, None))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_cache_may_have_another_dtype(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVCache.write() writes into a cache of another dtype, the rotating op into the same one."""
    layer = Attention(DIM, HEADS, KV_HEADS, HEAD, qk_norm="head", dtype=torch.float64)
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    angles = torch.randn(2, TOKENS, HEAD // 2, dtype=torch.float64)  # cos and sin per token
    cos, sin = angles.cos(), angles.sin()
    cache = KVCache(2, TOKENS, KV_HEADS, HEAD, dtype=dtype)
    calls: list[None] = []
    write: Any = KVCache.write
    monkeypatch.setattr(KVCache, "write", lambda *args: calls.append(write(*args)))
    with torch.no_grad():
        found = [
            layer(x[:, at], cos[:, at], sin[:, at], cache=cache, positions=at)
            for at in torch.arange(TOKENS).split(1)
        ]
        assert len(calls) == (0 if dtype == torch.float64 else TOKENS)
        digits = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
        expected = layer(x, cos, sin)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=digits, atol=digits)


@pytest.mark.cuda
def test_decoding_in_a_cuda_graph() -> None:
    layer = Attention(DIM, HEADS, KV_HEADS, HEAD, device="cuda")
    x = torch.randn(2, TOKENS, DIM, device="cuda")
    cos, sin = (t.cuda() for t in tables(TOKENS))
    cache = KVCache(2, TOKENS, KV_HEADS, HEAD, device="cuda")
    token, at = x[:, :1].clone(), torch.zeros(1, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        expected = layer(x, cos, sin)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(token, cos, sin, cache=cache, positions=at)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(token, cos, sin, cache=cache, positions=at)
        found = []
        for i in range(TOKENS):
            token.copy_(x[:, i : i + 1])
            at.fill_(i)
            graph.replay()
            found.append(y.clone())
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-3, atol=1e-4)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"num_kv_heads: got 4, expected a divisor of num_heads"):
        Attention(DIM, HEADS, 4)
    with pytest.raises(ValueError, match=r"heads: got 5, expected a divisor of dim = 24"):
        Attention(DIM, 5)
    with pytest.raises(ValueError, match=r"qk_norm: got 'row', expected 'head', 'all' or None"):
        Attention(DIM, HEADS, qk_norm="row")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"window: got 3 with causal=False"):
        Attention(DIM, HEADS, window=3, causal=False)
    with pytest.raises(ValueError, match=r"dropout|p: got 2"):
        Attention(DIM, HEADS, dropout=2)
    layer = Attention(DIM, HEADS, KV_HEADS, HEAD)
    with pytest.raises(ValueError, match=r"x: got shape \[3, 24\], expected \[batch, tokens, 24\]"):
        layer(torch.zeros(3, DIM))
    with pytest.raises(ValueError, match=r"sin: got one of cos and sin, expected both"):
        layer(torch.zeros(1, 3, DIM), torch.zeros(3, HEAD // 2))
    x = torch.zeros(1, 3, DIM)
    with pytest.raises(RuntimeError, match=r"decode under torch.no_grad\(\)"):
        layer(x, cache=KVCache(1, 4, KV_HEADS, HEAD))
    for rope in ((), tables(3)):
        cache = KVCache(1, 2, KV_HEADS, HEAD)
        with torch.no_grad(), pytest.raises(ValueError, match=r"got 3 tokens, expected at most 2"):
            layer(x, *rope, cache=cache, positions=torch.arange(3))


def test_explain_names_the_kernel_of_attention() -> None:
    layer = Attention(DIM, HEADS, KV_HEADS, HEAD)
    original = F.scaled_dot_product_attention
    found = torchkiln.explain(layer, torch.zeros(2, TOKENS, DIM))
    assert F.scaled_dot_product_attention is original
    (note,) = [n for n in found.forward.notes if "attention" in n]
    assert "of [2, 6, 7, 8] and [2, 2, 7, 8] with the causal mask: torch chose" in note


def test_the_cache_is_a_module() -> None:
    """The cache moves and converts as a module; its buffers are not in the state_dict."""
    cache = KVCache(2, 9, num_kv_heads=3, head_dim=4)
    assert cache.keys.shape == (2, 3, 9, 4)
    assert cache.max_length == 9
    assert "max_length=9, num_kv_heads=3, head_dim=4" in repr(cache)
    assert cache.to(torch.float64).values.dtype == torch.float64
    assert not cache.state_dict()
    with pytest.raises(TypeError, match="positional arguments"):
        KVCache(2, 9, 3, 4, "cpu")  # type: ignore[call-arg]
