"""Rotary position embeddings as functions of queries, keys, cos and sin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchkiln.ops.rope import rope
from torchkiln.patch.formula.reads import Reads
from torchkiln.patch.probe import numbers

HALF = (torch.float16, torch.bfloat16)
Dtypes = tuple[torch.dtype, torch.dtype]
"""Dtypes of heads and of angles."""

DTYPES: tuple[Dtypes, ...] = (
    *((dtype, dtype) for dtype in (torch.float64, torch.float32, *HALF)),
    *((dtype, torch.float32) for dtype in HALF),
)

Ranks = tuple[int, int]
"""Dimensions of heads and of angles."""

RANKS: tuple[Ranks, ...] = ((4, 3), (4, 2), (3, 2))


class Form(NamedTuple):
    """The arguments with which :func:`torchkiln.rope` computes a function."""

    heads_dim: int
    interleaved: bool
    factors: str
    """``pairs``: one column of cos for each pair; ``first``: the first half of the columns is read;
    ``halves``: both halves of the columns are equal; ``neighbours``: each column is twice there."""

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The results of the op in this form."""
        columns = cos.shape[-1]
        if self.factors == "first":
            cos, sin = cos[..., : columns // 2], sin[..., : columns // 2]
        rotary = 2 * columns if self.factors == "pairs" else columns
        return rope(
            q,
            k,
            cos,
            sin,
            interleaved=self.interleaved,
            rotary_dim=rotary,
            heads_dim=self.heads_dim,
        )


FORMS = tuple(
    Form(heads_dim, interleaved, factors)
    for heads_dim in (-3, -2)
    for factors, ways in {
        "pairs": (False, True),
        "first": (False, True),
        "halves": (False,),
        "neighbours": (True,),
    }.items()
    for interleaved in ways
)


class Sizes(NamedTuple):
    """Sizes of the arguments of a rotation."""

    batch: int
    heads: int
    others: int
    """The number of heads of the keys."""
    tokens: int
    rotary: int
    """The elements of a head that are rotated."""
    head: int


WHOLE = (Sizes(5, 6, 3, 9, 12, 12), Sizes(3, 2, 4, 7, 20, 20))
PARTIAL = (Sizes(5, 6, 3, 9, 12, 22), Sizes(3, 2, 4, 7, 20, 25))


class Sample(NamedTuple):
    """The arguments of a call of a rotation."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor

    def cast(self, dtypes: Dtypes, device: torch.device | None = None) -> Sample:
        """The arguments in other dtypes, of heads and of angles, in the same layout."""
        heads, angles = dtypes
        each = zip(self, (heads, heads, angles, angles), strict=True)
        return Sample(*(x.to(device, dtype) for x, dtype in each))


ORDERS = ("plain", "gaps", "turned")
"""Contiguous heads, heads with gaps between them, and heads and tokens in the other order."""


def sample(
    form: Form, ranks: Ranks, sizes: Sizes, *, order: str = "plain", alone: bool = False
) -> Sample:
    """Random float64 arguments; ``alone`` is whether the angles have a batch of 1."""
    rank, of_angles = ranks

    def heads(count: int, seed: int) -> Tensor:
        inner = (count, sizes.tokens) if form.heads_dim == -3 else (sizes.tokens, count)
        shape = (*(sizes.batch,) * (rank - 3), *inner, sizes.head)
        x = numbers(*shape, seed=seed)
        if order == "gaps":
            return torch.cat([x, x], -1)[..., : sizes.head]
        return x.transpose(-3, -2).contiguous().transpose(-3, -2) if order == "turned" else x

    def angles(seed: int) -> Tensor:
        is_each = form.factors == "first"
        columns = sizes.rotary if is_each else sizes.rotary // 2
        batch = (1 if alone else sizes.batch,) * (of_angles - 2)
        x = numbers(*batch, sizes.tokens, columns, seed=seed)
        if form.factors == "halves":
            return torch.cat([x, x], -1)
        return x.repeat_interleave(2, -1) if form.factors == "neighbours" else x

    return Sample(heads(sizes.heads, 1), heads(sizes.others, 2), angles(3), angles(4))


@dataclass(frozen=True)
class Rotation:
    """A function that is proven to compute the op, for calls with the same further arguments."""

    form: Form
    is_partial: bool
    """Whether heads may be wider than their rotated part."""
    is_dense: bool
    """Whether the results are contiguous; otherwise they have the order of the arguments."""
    dtypes: frozenset[Dtypes]
    reads: Reads

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The results of the op in the layout of the function."""
        q, k = self.form.rotated(q, k, cos, sin)
        return (q.contiguous(), k.contiguous()) if self.is_dense else (q, k)
