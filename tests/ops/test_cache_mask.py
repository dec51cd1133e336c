"""The attention mask of tokens that are decoded with a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchkiln.nn import KVCache

HEADS, HEAD = 2, 8


def mask(places: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    found: Tensor = torch.ops.torchkiln._cache_mask.default(places, length, dtype)
    return found


def expected_mask(places: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    seen = torch.arange(length, device=places.device) <= places[..., None]
    hidden = torch.zeros(seen.shape, dtype=dtype, device=places.device).masked_fill(
        ~seen, float("-inf")
    )
    return hidden if places.dim() == 1 else hidden[:, None]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("length", [1, 7, 16, 4096, 5003])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_keys_behind_a_token_are_hidden(
    device: torch.device, dtype: torch.dtype, length: int, batched: bool
) -> None:
    """A negative position hides all keys; a position past the end of the cache hides none."""
    places = [[0, 3, length - 1, length, 2**40], [-1, 1, 2, length // 2, -(2**40)]]
    at = torch.tensor(places, device=device)
    at = at if batched else at.flatten()
    found = mask(at, length, dtype)
    assert torch.equal(found, expected_mask(at, length, dtype))
    assert found.is_contiguous()


def test_positions_at_any_stride(device: torch.device) -> None:
    at = torch.arange(60, device=device, dtype=torch.int32).view(6, 10)
    for places in (at.T, at[::2, 1::3], at[:1].expand(4, 10), at[2, ::3]):
        assert torch.equal(
            mask(places, 64, torch.float32), expected_mask(places, 64, torch.float32)
        )


@pytest.mark.parametrize(
    ("dtype", "found"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.int8, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
    ],
)
def test_a_cache_without_infinity_has_a_mask_of_float32(
    dtype: torch.dtype, found: torch.dtype
) -> None:
    at = torch.tensor([2, 0, 5])
    assert torch.equal(
        KVCache(2, 9, HEADS, HEAD, dtype=dtype).mask(at), expected_mask(at, 9, found)
    )


def test_nothing_to_hide(device: torch.device) -> None:
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert mask(empty, 8, torch.float32).shape == (0, 8)
    assert mask(empty.view(0, 3), 8, torch.float32).shape == (0, 1, 3, 8)
    assert mask(torch.zeros(3, dtype=torch.int64, device=device), 0, torch.float32).shape == (3, 0)
