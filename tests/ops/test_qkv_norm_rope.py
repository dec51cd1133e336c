"""qkv_norm_rope beyond the contract: equal separate ops, attention, gradients, launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torchkiln

HEADS, KV_HEADS, SIZE = 4, 2, 64


def arguments(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Projection, cos, sin, and the weights of q and k."""
    shapes = (
        (2, 7, (HEADS + 2 * KV_HEADS) * SIZE),
        (7, SIZE // 2),
        (7, SIZE // 2),
        (SIZE,),
        (SIZE,),
    )
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def projected(given: list[Tensor], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    qkv, cos, sin, q_weight, k_weight = given
    return torchkiln.qkv_norm_rope(qkv, cos, sin, q_weight, k_weight, HEADS, KV_HEADS, **options)


def parts(qkv: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values as [batch, heads, tokens, head_dim]."""
    rows = qkv.unflatten(-1, (-1, SIZE)).transpose(1, 2)
    return rows.split([HEADS, KV_HEADS, KV_HEADS], 1)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_is_rms_norm_and_rope(device: torch.device, offset: float) -> None:
    qkv, cos, sin, *weights = arguments(device)
    q, k, v = parts(qkv)
    q, k = (
        torchkiln.rms_norm(x, SIZE, weight, 1e-6, offset=offset)
        for x, weight in zip((q, k), weights, strict=True)
    )
    expected = (*torchkiln.rope(q, k, cos, sin), v)
    found = projected([qkv, cos, sin, *weights], offset=offset)
    torch.testing.assert_close(found, expected)


def test_without_norm_is_rope(device: torch.device) -> None:
    qkv, cos, sin, *_ = arguments(device)
    q, k, v = parts(qkv)
    expected = (*torchkiln.rope(q, k, cos, sin), v)
    found = torchkiln.qkv_norm_rope(qkv, cos, sin, None, None, HEADS, KV_HEADS, norm="none")
    assert all(map(torch.equal, found, expected))


def test_results_have_the_heads_of_a_token_together(device: torch.device) -> None:
    """Results are contiguous by token, so attention makes no copy and returns a row per token."""
    found = projected(arguments(device))
    for x in found:
        assert x.transpose(1, 2).is_contiguous()
    y = F.scaled_dot_product_attention(*found, is_causal=True, enable_gqa=True)
    assert y.shape == (2, HEADS, 7, SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_parts(device: torch.device, dtype: torch.dtype) -> None:
    given = arguments(device, dtype)
    leaves = [given[0], given[3], given[4]]
    for leaf in leaves:
        leaf.requires_grad_()
    found = projected(given)
    grads = [torch.randn_like(x) for x in found]
    once, again = (torch.autograd.grad(found, leaves, grads, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, again))
    qkv, cos, sin, *weights = (x.detach().double() for x in given)
    wide = [x.requires_grad_() for x in (qkv, *weights)]
    q, k, v = parts(qkv)
    normed = [F.rms_norm(x, (SIZE,), w, 1e-6) for x, w in zip((q, k), weights, strict=True)]
    rotated = torchkiln.rope(normed[0], normed[1], cos, sin)
    expected = torch.autograd.grad((*rotated, v), wide, [g.double() for g in grads])
    close: dict[str, Any] = (
        {"atol": 2e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 2e-2}
    )
    for x, y in zip(once, expected, strict=True):
        torch.testing.assert_close(x.double(), y, **close)


@pytest.mark.parametrize("used", range(3))
def test_unused_results_have_gradient_zero(device: torch.device, used: int) -> None:
    given = arguments(device)
    given[0].requires_grad_()
    found = projected(given)
    (one,) = torch.autograd.grad(found[used].sum(), given[0], retain_graph=True)
    zeros = [torch.ones_like(x) if i == used else torch.zeros_like(x) for i, x in enumerate(found)]
    (all_given,) = torch.autograd.grad(found, given[0], zeros)
    assert torch.equal(one, all_given)


def test_projection_may_be_a_part_of_wider_rows(device: torch.device) -> None:
    qkv, *rest = arguments(device)
    wide = torch.cat([qkv, qkv], -1)[..., : qkv.shape[-1]]
    expected = projected([qkv, *rest])
    found = projected([wide, *rest])
    assert all(map(torch.equal, found, expected))


def test_heads_of_more_than_1024_elements_are_refused(device: torch.device) -> None:
    qkv, table = torch.ones(2, 3 * 1026, device=device), torch.ones(2, 513, device=device)
    words = "qkv_norm_rope: qkv: got heads of 1026 elements, expected at most 1024"
    with pytest.raises(RuntimeError, match=words):
        torchkiln.qkv_norm_rope(qkv, table, table, None, None, 1, 1)


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256, 1024])
def test_many_tokens(device: torch.device, size: int) -> None:
    """More tokens than the blocks of one round process."""
    tokens = 3001 if size < 256 else 301
    qkv = torch.randn(tokens, 3 * size, device=device, dtype=torch.float64)
    cos, sin = (torch.randn(tokens, size // 2, device=device, dtype=torch.float64) for _ in "cs")
    weight = torch.randn(size, device=device, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (qkv, weight)]
    found = torchkiln.qkv_norm_rope(qkv, cos, sin, weight, weight, 1, 1)
    rows = qkv.unflatten(-1, (3, size)).transpose(0, 1)
    normed = F.rms_norm(rows[:2], (size,), weight, 1e-6)
    expected = (*torchkiln.rope(normed, None, cos, sin)[0].split(1), rows[2:])
    torch.testing.assert_close(found, expected)
    grads = [torch.randn_like(x) for x in found]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, grads), torch.autograd.grad(expected, leaves, grads)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"interleaved": True, "rotary_dim": 192}, {"norm": "none"}]
)
def test_rounds_of_groups_of_heads(
    device: torch.device, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Groups of heads that are not full, in several rounds, across batches agree with float64."""
    batch, tokens, heads, kv_heads, size = 3, 1001, 5, 2, 256
    pairs = options.get("rotary_dim", size) // 2
    shapes = ((batch, tokens, (heads + 2 * kv_heads) * size), (tokens, pairs), (tokens, pairs))
    given = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    if options.get("norm") != "none":
        given += [torch.randn(size, device=device).to(dtype) for _ in "qk"]
    wide = [x.double() for x in given]
    for leaves in (given, wide):
        for i in (0, *range(3, len(given))):
            leaves[i].requires_grad_()

    qkv, cos, sin, *weights = given
    q_weight, k_weight = weights or (None, None)
    found = torchkiln.qkv_norm_rope(qkv, cos, sin, q_weight, k_weight, heads, kv_heads, **options)
    q, k, v = (
        wide[0].unflatten(-1, (-1, size)).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
    )
    if options.get("norm") != "none":
        q, k = (F.rms_norm(x, (size,), w, 1e-6) for x, w in zip((q, k), wide[3:], strict=True))
    turns = {name: value for name, value in options.items() if name != "norm"}
    expected = (*torchkiln.rope(q, k, *wide[1:3], **turns), v)
    eps = max(torch.finfo(dtype).eps, 1e-6)  # float32 sums of 256 terms
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=eps, atol=2e-5)  # terms cancel in float32
    grads = [torch.randn_like(x) for x in found]
    ours, theirs = ([of[i] for i in (0, *range(3, len(of)))] for of in (given, wide))
    once, again = (torch.autograd.grad(found, ours, grads, retain_graph=True) for _ in "ab")
    assert all(map(torch.equal, once, again))
    truth = torch.autograd.grad(expected, theirs, [g.double() for g in grads])
    for x, y in zip(once, truth, strict=True):
        largest = y.abs().max().item()
        torch.testing.assert_close(x.double(), y, rtol=eps, atol=2e-5 * largest)


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"rotary_dim": 32}])
def test_cos_and_sin_have_gradients(device: torch.device, options: dict[str, Any]) -> None:
    """Learned angles have first and second derivatives, as the other arguments have."""
    given = [x.double() for x in arguments(device)]
    if "rotary_dim" in options:
        given[1:3] = [x[:, :16].contiguous() for x in given[1:3]]
    qkv, cos, sin, *weights = leaves = [x.requires_grad_() for x in given]
    q, k, v = parts(qkv)
    normed = [F.rms_norm(x, (SIZE,), w, 1e-6) for x, w in zip((q, k), weights, strict=True)]
    expected = (*torchkiln.rope(normed[0], normed[1], cos, sin, **options), v)
    found = projected(leaves, **options)
    grads = [torch.randn_like(x) for x in found]

    def derivatives(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(outputs, leaves, grads, create_graph=True)
        squares = torch.stack([(g * g).sum() for g in first]).sum()
        return *first, *torch.autograd.grad(squares, leaves)

    torch.testing.assert_close(derivatives(found), derivatives(expected))


@pytest.mark.parametrize(
    "counts",
    [(301, 4, 2, 64), (301, 3, 1, 21), (301, 100, 4, 128), (1, 601, 151, 64), (3, 700, 100, 21)],
    ids=str,
)
def test_a_norm_of_all_heads(device: torch.device, counts: tuple[int, int, int, int]) -> None:
    """Norms of all heads agree with torch: more tokens than blocks, sums of several blocks."""
    tokens, heads, kv_heads, size = counts
    rotated = size - size % 2
    shapes = (
        (tokens, (heads + 2 * kv_heads) * size),
        (heads * size,),
        (kv_heads * size,),
    )
    qkv, *weights = leaves = [
        torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    cos, sin = torch.randn(2, tokens, rotated // 2, device=device, dtype=torch.float64)
    found = torchkiln.qkv_norm_rope(
        qkv, cos, sin, weights[0], weights[1], heads, kv_heads, norm="all", rotary_dim=rotated
    )
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    parts = [
        F.rms_norm(x, x.shape[1:], weight, 1e-6) if weight is not None else x
        for x, weight in zip(qkv.split(sizes, -1), (*weights, None), strict=True)
    ]
    q, k, v = (x.unflatten(-1, (-1, size)).transpose(0, 1) for x in parts)
    expected = (*torchkiln.rope(q, k, cos, sin, rotary_dim=rotated), v)
    torch.testing.assert_close(found, expected)
    grads = [torch.randn_like(x) for x in found]
    once, again = (torch.autograd.grad(found, leaves, grads, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, once, again))
    torch.testing.assert_close(once, torch.autograd.grad(expected, leaves, grads))
