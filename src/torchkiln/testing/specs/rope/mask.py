"""The contract of the mask of tokens that are decoded into a cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchkiln.testing.refusals import GoodCall
from torchkiln.testing.sample import Invalid, Sample
from torchkiln.testing.spec import OpSpec


def cache_mask(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The op that ``torchkiln.nn.KVCache.mask`` calls."""
    found: Tensor = torch.ops.torchkiln._cache_mask.default(positions, length, dtype)
    return found


def reference(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """0 for keys up to a token's position, else -infinity; batches get a size of 1 for heads."""
    hidden = torch.arange(length, device=positions.device) > positions.unsqueeze(-1)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    mask = mask.masked_fill(hidden, -torch.inf)
    return mask if positions.dim() == 1 else mask.unsqueeze(1)


def magnitude(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Zeros, because no element is rounded."""
    return torch.zeros_like(reference(positions, length, dtype))


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with positions before, inside of and after the cache, and without tokens."""
    places = torch.tensor([[0, 3, 8, 2**40], [-1, 1, 2, -(2**40)]], device=device)
    yield Sample("typical", (places, 9, dtype))
    yield Sample("no batch", (places[0], 16, dtype))
    yield Sample("int32", (places.clamp(-5, 5).int(), 7, dtype))
    yield Sample("long", (places[1], 5003, dtype))
    yield Sample("no tokens", (places[:, :0], 8, dtype))
    yield Sample("no cache", (places[0], 0, dtype))


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with positions of a wrong dtype or rank, and with wrong lengths and dtypes."""
    at = torch.tensor([1, 2], device=device)
    good = GoodCall(
        torch.ops.torchkiln._cache_mask.default,
        Sample("good", (at, 4, torch.float32)),
        "cache_mask",
    )
    for error, words, changed in (
        (RuntimeError, "positions: got dtype float32, expected", {"positions": at.float()}),
        (RuntimeError, "positions: got shape [], expected", {"positions": at[0]}),
        (ValueError, "length: got -1, expected", {"length": -1}),
        (RuntimeError, "dtype: got int64, expected float32", {"dtype": torch.int64}),
    ):
        case = good.changed(words, error, **changed)
        yield Invalid(case.name, case.args, error, f"{case.message}.*")


CACHE_MASK = OpSpec(
    op=cache_mask,
    name="cache_mask",
    overload=torch.ops.torchkiln._cache_mask.default,
    reference=reference,
    magnitude=magnitude,
    inputs=inputs,
    differentiable=(),
    indices=(0,),
    invalid=invalid,
    large=None,
    opaque=True,
)
