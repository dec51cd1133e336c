"""Rotary embedding beyond the contract: Hugging Face's formula, views, positions, saved tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchkiln


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """The rotation function of Hugging Face's models."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def tables(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    angles = 3 * torch.randn(shape, device=device, dtype=torch.float64)
    return [angles.cos().to(dtype), angles.sin().to(dtype)]


@pytest.mark.parametrize("heads_dim", [1, 2])
def test_is_the_function_of_hugging_face(device: torch.device, heads_dim: int) -> None:
    q, k = (torch.randn(2, n, 5, 16, device=device) for n in (6, 2))
    if heads_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    half = tables(device, 2, 5, 8)
    cos, sin = (torch.cat((t, t), -1) for t in half)
    expected = apply_rotary_pos_emb(q, k, cos, sin, heads_dim)
    for factors in ((cos, sin), half):
        found = torchkiln.rope(q, k, *factors, heads_dim=heads_dim)
        torch.testing.assert_close(found, expected)


def test_pairs_are_complex_numbers(device: torch.device) -> None:
    q, k = (torch.randn(2, 3, 5, 12, device=device, dtype=torch.float64) for _ in range(2))
    cos, sin = tables(device, 5, 6, dtype=torch.float64)
    found = torchkiln.rope(q, k, cos, sin, interleaved=True)
    for x, y in zip((q, k), found, strict=True):
        turned = torch.view_as_complex(x.unflatten(-1, (6, 2))) * torch.complex(cos, sin)
        torch.testing.assert_close(y, torch.view_as_real(turned).flatten(-2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_packed_views_without_a_copy(device: torch.device, dtype: torch.dtype) -> None:
    """Results have the order of the projection in memory: tokens, then heads."""
    packed = torch.randn(2, 7, 10, 64, device=device, dtype=dtype)
    q, k, _ = packed.transpose(1, 2).split([6, 2, 2], 1)
    cos, sin = tables(device, 7, 32)
    found = torchkiln.rope(q, k, cos, sin)
    assert "copied" not in str(torchkiln.explain(torchkiln.rope, q, k, cos, sin))
    expected = torchkiln.rope(q.contiguous(), k.contiguous(), cos, sin)
    for y, other in zip(found, expected, strict=True):
        assert y.transpose(1, 2).is_contiguous()
        assert other.is_contiguous()
        assert torch.equal(y, other)


def test_angles_of_several_axes(device: torch.device) -> None:
    """Qwen2-VL's angles agree with its formula: parts of a head rotate by time, row and column."""
    axes = torch.randint(9, (3, 2, 5), device=device)
    frequencies = 1e4 ** -torch.linspace(0, 1, 8, device=device)
    q, k = (torch.randn(2, n, 5, 16, device=device) for n in (4, 1))
    angles = torch.cat([axes[..., None] * frequencies] * 2, -1)
    sections = [2, 3, 3, 2, 3, 3]  # pairs per axis, for both halves
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(f(angles).split(sections, -1))], -1)
        for f in (torch.cos, torch.sin)
    )
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    axis = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2], device=device)
    of_pairs = axes.movedim(0, -1)[..., axis] * frequencies
    found = torchkiln.rope(q, k, of_pairs.cos(), of_pairs.sin())
    torch.testing.assert_close(found, expected)


def test_scaled_factors_scale_the_result(device: torch.device) -> None:
    """Scaled cos and sin, as in YaRN, scale the rotated columns only."""
    q = torch.randn(2, 3, 5, 16, device=device)
    cos, sin = tables(device, 5, 4)
    expected, _ = torchkiln.rope(q, None, cos, sin, rotary_dim=8)
    found, _ = torchkiln.rope(q, None, 1.5 * cos, 1.5 * sin, rotary_dim=8)
    torch.testing.assert_close(found[..., :8], 1.5 * expected[..., :8])
    assert torch.equal(found[..., 8:], q[..., 8:])


def test_without_k_the_second_result_is_none(device: torch.device) -> None:
    q = torch.randn(2, 3, 5, 16, device=device)
    cos, sin = tables(device, 5, 8)
    expected, other = torchkiln.rope(q, None, cos, sin)
    assert other is None
    with torch.overrides.BaseTorchFunctionMode():
        assert torchkiln.rope(q, None, cos, sin)[1] is None
    compiled: Any = torch.compile(torchkiln.rope, backend="aot_eager", fullgraph=True)
    found, other = compiled(q, None, cos, sin)
    assert other is None
    assert torch.equal(found, expected)
    assert torchkiln.nn.RotaryEmbedding(16, 5).to(device)(q)[1] is None


def test_positions_are_rows_of_the_table(device: torch.device) -> None:
    q = torch.randn(3, 2, 4, 8, device=device)
    cos, sin = tables(device, 50, 4)
    positions = torch.randint(50, (3, 4), device=device)
    expected, _ = torchkiln.rope(q, None, cos[positions], sin[positions])
    for rows in (positions, positions.int(), positions.t().contiguous().t()):
        found, _ = torchkiln.rope(q, None, cos, sin, positions=rows)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("position", [-1, 9, 2**40])
def test_a_position_outside_of_the_table_gives_nan(device: torch.device, position: int) -> None:
    q = torch.randn(1, 2, 3, 8, device=device)
    cos, sin = tables(device, 9, 2)
    rows = torch.tensor([0, position, 8], device=device)
    found, _ = torchkiln.rope(q, None, cos, sin, positions=rows, rotary_dim=4)
    assert found[:, :, 1, :4].isnan().all()
    assert torch.equal(found[:, :, 1, 4:], q[:, :, 1, 4:])
    assert found[:, :, ::2].isfinite().all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_undoes_it_and_is_the_gradient(device: torch.device, interleaved: bool) -> None:
    q, k = (
        torch.randn(2, n, 5, 20, device=device, dtype=torch.float64, requires_grad=True)
        for n in (3, 1)
    )
    cos, sin = tables(device, 5, 6, dtype=torch.float64)
    rest: dict[str, Any] = {"interleaved": interleaved, "rotary_dim": 12}
    found = torchkiln.rope(q, k, cos, sin, **rest)
    back = torchkiln.rope(found[0], found[1], cos, sin, inverse=True, **rest)
    torch.testing.assert_close(back, (q, k))
    grads = [torch.randn_like(y) for y in found]
    turned = torchkiln.rope(grads[0], grads[1], cos, sin, inverse=True, **rest)
    assert all(map(torch.equal, torch.autograd.grad(found, (q, k), grads), turned))


def test_saves_no_heads(device: torch.device) -> None:
    q = torch.randn(2, 3, 5, 8, device=device, requires_grad=True)
    cos, sin = tables(device, 5, 4)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torchkiln.rope(q, q.detach(), cos, sin)
    assert [t.data_ptr() for t in saved] == [cos.data_ptr(), sin.data_ptr()]


def test_one_result_may_be_unused(device: torch.device) -> None:
    q, k = (torch.randn(2, n, 5, 8, device=device, requires_grad=True) for n in (3, 1))
    cos, sin = tables(device, 5, 4)
    for at, x in enumerate((q, k)):
        y = torchkiln.rope(q, k, cos, sin)[at]
        (found,) = torch.autograd.grad(y.sum(), x)
        expected, _ = torchkiln.rope(torch.ones_like(x), None, cos, sin, inverse=True)
        assert torch.equal(found, expected)


def test_module_keeps_its_tables_in_float32(device: torch.device) -> None:
    layer = torchkiln.nn.RotaryEmbedding(16, 32, interleaved=True, rotary_dim=8, device=device)
    q, k = (torch.randn(2, n, 5, 16, device=device) for n in (4, 2))
    expected = layer(q, k)
    torch.testing.assert_close(layer(q, k, torch.arange(5, device=device)), expected)
    assert not layer.state_dict()
    for dtype, table in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        layer.to(dtype)
        assert layer.cos.dtype == layer.sin.dtype == table
        found = layer(q.to(dtype), k.to(dtype))
        torch.testing.assert_close(
            found, tuple(y.to(dtype) for y in expected), atol=2e-2, rtol=2e-2
        )


def test_module_with_tokens_before_heads(device: torch.device) -> None:
    q, k = (torch.randn(2, 5, n, 16, device=device) for n in (4, 2))
    layers = [torchkiln.nn.RotaryEmbedding(16, 9, heads_dim=at, device=device) for at in (-2, 2)]
    expected = torchkiln.nn.RotaryEmbedding(16, device=device)(q.transpose(1, 2), k.transpose(1, 2))
    for layer in layers:
        for y, other in zip(layer(q, k), expected, strict=True):
            assert torch.equal(y.transpose(1, 2), other)


def test_module_refuses_more_tokens_than_rows(device: torch.device) -> None:
    layer = torchkiln.nn.RotaryEmbedding(8, 4, device=device)
    with pytest.raises(RuntimeError, match=r"rope: cos: got shape \[4, 4\], expected \[5, 4\]"):
        layer(torch.ones(1, 2, 5, 8, device=device))
