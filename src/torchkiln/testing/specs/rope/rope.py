"""The contract of the rotary embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.data import cycle, normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec

HEAD_DIM = 128
BENCH_SHAPES = ((8192, 1024), (8192, 4096), (32768, 4096))
"""Tokens, and elements of the queries of a token."""
SMALL_SHAPES = tuple((tokens, 4096) for tokens in (1, 8, 64, 512))


def call(
    name: str,
    q: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    cos: tuple[int, ...],
    heads: int | None = None,
    factors: torch.dtype | None = None,
    **options: Any,
) -> Sample:
    """A call with a ``q`` of this shape, and a ``k`` with ``heads`` heads; no ``k`` for 0 heads."""
    at = options.get("heads_dim", -3)
    shape = [*q]
    shape[at] = q[at] if heads is None else heads
    k = None if heads == 0 else normal("k", shape, device, dtype)
    tables = [normal(each, cos, device, factors or dtype) for each in ("cos", "sin")]
    return Sample(name, (normal("q", q, device, dtype), k, *tables), options)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with both layouts and pairings, head sizes with each tail, tables, partial heads."""

    def sample(name: str, q: tuple[int, ...], **rest: Any) -> Sample:
        return call(name, q, device, dtype, **rest)

    yield sample("typical", (2, 3, 4, 8), cos=(4, 4))
    yield sample("interleaved", (2, 3, 4, 8), cos=(4, 4), interleaved=True)
    yield sample("tokens before heads", (2, 5, 4, 64), cos=(2, 5, 32), heads=2, heads_dim=-2)
    yield sample("from the front", (2, 5, 4, 16), cos=(5, 16), heads=1, heads_dim=2)
    yield sample("no batch", (6, 7, 128), cos=(7, 128), heads=2)
    yield sample("no k", (2, 3, 5, 32), cos=(1, 5, 16), heads=0)
    yield sample("interleaved, doubled", (2, 9, 6, 96), cos=(6, 96), heads=3, interleaved=True)
    yield sample("part", (2, 3, 5, 80), cos=(5, 16), rotary_dim=32)
    yield sample("part, interleaved", (1, 2, 5, 20), cos=(5, 12), rotary_dim=12, interleaved=True)
    yield sample("odd heads", (1, 5, 3, 21), cos=(3, 5), heads=7, rotary_dim=10)
    yield sample("one element per pair", (3, 2, 5, 2), cos=(5, 1))
    yield sample("wide", (1, 2, 3, 320), cos=(3, 160))
    yield sample("no tokens", (2, 3, 0, 8), cos=(0, 4))
    yield sample("no elements", (2, 3, 4, 0), cos=(4, 0))
    yield sample("no heads", (2, 0, 4, 8), cos=(4, 4), heads=2)
    yield sample("many tokens", (3, 5, 1031, 16), cos=(1031, 8), heads=2)
    yield sample("inverse", (2, 3, 4, 6), cos=(4, 3), inverse=True)
    rows = torch.tensor([[4, 0, 2, 10], [10, 3, 3, 9]], device=device)
    yield sample("positions", (2, 3, 4, 8), cos=(11, 4), positions=rows)
    yield sample("int32 positions", (2, 3, 4, 16), cos=(11, 16), positions=rows[0].int())
    if dtype in (torch.float16, torch.bfloat16):
        yield sample("float32 factors", (2, 9, 7, 128), cos=(7, 64), factors=torch.float32)
        yield sample("float32 factors, odd", (2, 3, 7, 18), cos=(7, 9), factors=torch.float32)


class Arguments:
    """The arguments of a call, with the factors of each pair of each token."""

    def __init__(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **rest: Any) -> None:
        self.tensors = [q] if k is None else [q, k]
        self.rotated: int = rest.get("rotary_dim") or q.shape[-1]
        self.interleaved: bool = rest.get("interleaved", False)
        at = rest.get("heads_dim", -3)
        self.at = at if at < 0 else at - q.dim()
        positions = rest.get("positions")
        self.positions: Tensor | None = None if positions is None else positions.long()
        self.cos, self.sin = self.factors(cos), self.factors(sin)
        if rest.get("inverse", False):
            self.sin = -self.sin

    def factors(self, table: Tensor) -> Tensor:
        """The factors of each pair, which broadcast to the pairs of the heads."""
        if self.rotated and table.shape[-1] == self.rotated:
            pairs = self.rotated // 2
            table = table[..., ::2] if self.interleaved else table[..., :pairs]
        return (table if self.positions is None else table[self.positions]).unsqueeze(self.at)

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second elements of the pairs."""
        x = x[..., : self.rotated]
        if self.interleaved:
            return x[..., ::2], x[..., 1::2]
        return x[..., : self.rotated // 2], x[..., self.rotated // 2 :]

    def joined(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Heads of these pairs, and the elements of x that are not rotated."""
        pairs = torch.stack([a, b], -1).flatten(-2) if self.interleaved else torch.cat([a, b], -1)
        return torch.cat([pairs.to(x.dtype), x[..., self.rotated :]], -1)


def reference(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The formula of the op in plain torch."""
    given = Arguments(*args, **kwargs)

    def rotated(x: Tensor) -> Tensor:
        a, b = given.pairs(x)
        return given.joined(x, a * given.cos - b * given.sin, b * given.cos + a * given.sin)

    return tuple(map(rotated, given.tensors))


def magnitude(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The magnitude of each element's terms, to which its rounding error is proportional."""
    given = Arguments(*args, **kwargs)
    cos, sin = given.cos.abs(), given.sin.abs()

    def sizes(x: Tensor) -> Tensor:
        a, b = given.pairs(x.abs())
        return given.joined(x.abs(), a * cos + b * sin, b * cos + a * sin)

    return tuple(map(sizes, given.tensors))


def gradient_magnitude(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """A function whose gradients are the op's, with the absolute values of all terms."""
    given = Arguments(*args, **kwargs)
    cos, sin = given.cos, given.sin

    def sizes(x: Tensor) -> Tensor:
        a, b = given.pairs(x)
        fixed_a, fixed_b = (half.detach().abs() for half in (a, b))
        fixed_cos, fixed_sin = cos.detach().abs(), sin.detach().abs()
        first = a * fixed_cos + b * fixed_sin + fixed_a * cos + fixed_b * sin
        second = b * fixed_cos + a * fixed_sin + fixed_b * cos + fixed_a * sin
        return given.joined(x, first, second)

    return tuple(map(sizes, given.tensors))


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """Views of a packed projection with 4 query heads per key head.

    The factors are float32 and need no gradient, as in models.
    """
    tokens, elements = shape
    heads = max(elements // HEAD_DIM, 1)
    few = max(heads // 4, 1)
    packed = torch.randn(1, tokens, heads + 2 * few, HEAD_DIM, device=device, dtype=dtype)
    q, k, _ = packed.transpose(1, 2).split([heads, few, few], 1)
    angles = torch.randn(tokens, HEAD_DIM // 2, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    return Sample("bench", (q, k), {"cos": angles.cos().to(wide), "sin": angles.sin().to(wide)})


def large(device: torch.device) -> Sample:
    """A call with queries of more than 2**31 elements that repeat one row of heads."""
    tokens, heads = 2**18 + 1, 65
    row = cycle(heads * HEAD_DIM, 251, device).view(1, heads, HEAD_DIM)
    steps = cycle(tokens, 241, device).view(tokens, 1, 1)
    factors = [cycle(tokens * 64, length, device).view(tokens, 64) for length in (113, 127)]
    return Sample("large", (row * steps, None, *factors), {"heads_dim": -2})


def traffic(sample: Sample) -> Traffic:
    """Reads the heads and the factors, writes the heads."""
    given = Arguments(*sample.args, **sample.kwargs)
    heads = sum(x.nbytes for x in given.tensors)
    factors = given.cos.nbytes + given.sin.nbytes
    return Traffic(2 * heads + factors, 3 * heads // given.tensors[0].element_size())


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with shapes that do not fit q, and with options out of range."""
    x, table = torch.ones(2, 3, 4, 8, device=device), torch.ones(4, 4, device=device)
    good = GoodCall(torch.ops.torchkiln.rope.default, Sample("good", (x, x, table, table)))
    words = "expected 3 or 4 dimensions, the last of which is that of a head"
    for q in (x[0, 0], x[None]):
        yield good.changed(f"q: got shape {list(q.shape)}, {words}", q=q)
    words = (
        "expected -3 for [..., heads, tokens, head_dim] or -2 for [..., tokens, heads, head_dim]"
    )
    for at in (0, 3, -1, -4):
        yield good.changed(f"heads_dim: got {at}, {words}", ValueError, heads_dim=at)
    words = "expected [2, 3, 4, 8], the shape of q, with any number of heads in dimension 1"
    for k in (x[:1], x[:, :, :3], x[..., :6], x[0]):
        yield good.changed(f"k: got shape {list(k.shape)}, {words}", k=k)
    words = "expected an even number; rotary_dim= rotates a part of each head"
    yield good.changed(f"q: got heads of 7 elements, {words}", q=x[..., :7], k=None)
    words = "expected an even number from 2 to 8, the elements of a head"
    for size in (0, -2, 3, 10):
        yield good.changed(f"rotary_dim: got {size}, {words}", ValueError, rotary_dim=size)
    each = "a factor for each pair of each token, or each factor twice"
    for cos in (table[:3], table[:, :3], table[0], x[..., :4], table[None].expand(3, 4, 4)):
        said = f"cos: got shape {list(cos.shape)}, expected [4, 4] or [2, 4, 4], {each}"
        yield good.changed(said, cos=cos, sin=cos)
    rows = torch.zeros(4, dtype=torch.int64, device=device)
    each = "a factor for each pair of each position, or each factor twice"
    said = f"cos: got shape [2, 4, 4], expected [rows, 4], {each}"
    wide = table.expand(2, 4, 4)
    yield good.changed(said, cos=wide, sin=wide, positions=rows)
    yield good.changed(
        "positions: got dtype float32, expected int64 or int32", positions=rows.float()
    )
    words = "expected [4] or [2, 4], a row of cos and sin for each token"
    for wrong in (rows[:3], rows.expand(3, 4), rows[0]):
        said = f"positions: got shape {list(wrong.shape)}, {words}"
        yield good.changed(said, positions=wrong)


ROPE = OpSpec(
    op=torchkiln.rope,
    reference=reference,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    refusals=Refusals(dtypes={"k": "q"}, parameters={"cos": "q"}, like={"sin": "cos"}),
    invalid=invalid,
    bench=bench,
    bench_shapes=BENCH_SHAPES,
    small_shapes=SMALL_SHAPES,
    large=large,
    traffic=traffic,
    backward_traffic=traffic,
    opaque=True,
    module=layer(torchkiln.nn.RotaryEmbedding, 8, 16),
    module_inputs=lambda device, dtype: next(iter(inputs(device, dtype))).args[:2],
)
