"""The contract of the rotary embedding."""

from __future__ import annotations

import math
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
    """A call with a q of this shape, and a k with as many heads, or without k for no heads."""
    at = options.get("heads_dim", -3)
    shape = [*q]
    shape[at] = q[at] if heads is None else heads
    k = None if heads == 0 else normal("k", shape, device, dtype)
    tables = [normal(each, cos, device, factors or dtype) for each in ("cos", "sin")]
    return Sample(name, (normal("q", q, device, dtype), k, *tables), options)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Both layouts and pairings, widths of heads with every vector tail, tables, parts of heads."""

    def sample(name: str, q: tuple[int, ...], **rest: Any) -> Sample:
        return call(name, q, device, dtype, **rest)

    yield sample("typical", (2, 3, 4, 8), cos=(4, 4))
    yield sample("interleaved", (2, 3, 4, 8), cos=(4, 4), interleaved=True)
    yield sample("tokens before heads", (2, 5, 4, 64), cos=(2, 5, 32), heads=2, heads_dim=-2)
    yield sample("from the front", (2, 5, 4, 16), cos=(5, 16), heads=1, heads_dim=2)
    yield sample("no batch", (6, 7, 128), cos=(7, 128), heads=2)
    yield sample("no k", (2, 3, 5, 32), cos=(1, 5, 16), heads=0)
    yield sample("interleaved, doubled", (2, 9, 6, 96), cos=(6, 96), heads=3, interleaved=True)
    yield sample("part", (2, 3, 5, 80), cos=(5, 16), partial=32)
    yield sample("part, interleaved", (1, 2, 5, 20), cos=(5, 12), partial=12, interleaved=True)
    yield sample("odd heads", (1, 5, 3, 21), cos=(3, 5), heads=7, partial=10)
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
        self.rotated: int = rest.get("partial") or q.shape[-1]
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

    def results(self, *found: Tensor) -> tuple[Tensor, Tensor]:
        """The results of the op: an empty one without k."""
        return found[0], found[1] if len(found) > 1 else self.tensors[0][:0].reshape(0)


def reference(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The formula."""
    given = Arguments(*args, **kwargs)

    def rotated(x: Tensor) -> Tensor:
        a, b = given.pairs(x)
        return given.joined(x, a * given.cos - b * given.sin, b * given.cos + a * given.sin)

    return given.results(*map(rotated, given.tensors))


def magnitude(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The terms of each element."""
    given = Arguments(*args, **kwargs)
    cos, sin = given.cos.abs(), given.sin.abs()

    def sizes(x: Tensor) -> Tensor:
        a, b = given.pairs(x.abs())
        return given.joined(x.abs(), a * cos + b * sin, b * cos + a * sin)

    return given.results(*map(sizes, given.tensors))


def gradient_magnitude(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """A function whose gradients are the sums of the absolute values of the terms."""
    given = Arguments(*args, **kwargs)
    cos, sin = given.cos, given.sin

    def sizes(x: Tensor) -> Tensor:
        a, b = given.pairs(x)
        fixed_a, fixed_b = (half.detach().abs() for half in (a, b))
        fixed_cos, fixed_sin = cos.detach().abs(), sin.detach().abs()
        first = a * fixed_cos + b * fixed_sin + fixed_a * cos + fixed_b * sin
        second = b * fixed_cos + a * fixed_sin + fixed_b * cos + fixed_a * sin
        return given.joined(x, first, second)

    return given.results(*map(sizes, given.tensors))


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """Parts of a packed projection with a quarter as many heads for the keys.

    The factors are float32, and constants, as in models.
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
    """Queries of more than 2**31 elements that repeat one row of heads."""
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
    """Shapes that do not fit q, and options out of range."""
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
    words = "expected an even number; partial= rotates a part of each head"
    yield good.changed(f"q: got heads of 7 elements, {words}", q=x[..., :7], k=None)
    words = "expected an even number from 2 to 8, the elements of a head"
    for partial in (0, -2, 3, 10):
        yield good.changed(f"partial: got {partial}, {words}", ValueError, partial=partial)
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


def qkv_call(
    name: str,
    leading: tuple[int, ...],
    counts: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    cos: tuple[int, ...],
    weights: torch.dtype | None = None,
    factors: torch.dtype | None = None,
    has_weights: bool = True,
    **options: Any,
) -> Sample:
    """A call with these numbers of heads, of heads of the keys, and of elements of a head."""
    heads, kv_heads, size = counts
    shape = (*leading, (heads + 2 * kv_heads) * size)
    tables = [normal(each, cos, device, factors or dtype) for each in ("cos", "sin")]
    given: list[Tensor | None] = [None, None]
    if has_weights:
        sizes = [heads * size, kv_heads * size] if options.get("norm") == "all" else [size, size]
        given = [
            normal(name, (each,), device, weights or dtype)
            for name, each in zip(("q_weight", "k_weight"), sizes, strict=True)
        ]
    args = (normal("qkv", shape, device, dtype), *tables, *given, heads, kv_heads)
    return Sample(name, args, options)


def qkv_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Widths of heads with every team of threads, parts, tables, with and without norm."""

    def sample(name: str, lead: tuple[int, ...], counts: tuple[int, int, int], **r: Any) -> Sample:
        return qkv_call(name, lead, counts, device, dtype, **r)

    yield sample("typical", (2, 4), (3, 1, 8), cos=(4, 4))
    yield sample("no batch", (5,), (4, 2, 64), cos=(5, 32))
    yield sample("doubled", (2, 3), (5, 2, 128), cos=(3, 128))
    yield sample("interleaved", (2, 3), (2, 1, 96), cos=(1, 3, 48), interleaved=True)
    yield sample("no weights", (2, 3), (2, 1, 16), cos=(2, 3, 8), has_weights=False)
    yield sample("no norm", (2, 3), (2, 3, 32), cos=(3, 16), has_weights=False, norm="none")
    yield sample("offset", (2, 3), (2, 1, 80), cos=(3, 40), offset=1.0, eps=1e-5)
    yield sample("part", (1, 5), (2, 1, 80), cos=(5, 16), partial=32)
    yield sample("odd heads", (1, 3), (3, 2, 21), cos=(3, 5), partial=10)
    yield sample("all heads", (2, 3), (4, 2, 64), cos=(3, 32), norm="all", offset=0.5)
    yield sample("all heads, odd", (2, 3), (3, 2, 21), cos=(3, 5), partial=10, norm="all")
    yield sample("many heads", (3,), (67, 9, 32), cos=(3, 16), norm="all", interleaved=True)
    yield sample("wide", (2,), (1, 1, 320), cos=(2, 160))
    yield sample("one pair", (2, 3), (2, 1, 2), cos=(3, 1))
    yield sample("no tokens", (2, 0), (2, 1, 8), cos=(0, 4))
    yield sample("many tokens", (3, 171), (2, 1, 16), cos=(171, 8))
    rows = torch.tensor([[4, 0, 2, 10], [10, 3, 3, 9]], device=device)
    yield sample("positions", (2, 4), (2, 1, 8), cos=(11, 4), positions=rows)
    if dtype in (torch.float16, torch.bfloat16):
        wide = {"weights": torch.float32, "factors": torch.float32}
        yield sample("float32 weights and factors", (2, 3), (4, 1, 128), cos=(3, 64), **wide)
        yield sample("float32 weights, odd", (2, 3), (2, 1, 18), cos=(3, 9), **wide)
        yield sample("float32 weights, all", (9,), (2, 1, 64), cos=(9, 32), norm="all", **wide)


class Projection:
    """The heads of a packed projection, and the rotation of its queries and keys."""

    def __init__(  # noqa: PLR0917
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        heads: int,
        kv_heads: int,
        **rest: Any,
    ) -> None:
        packed = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(-2, -3)
        self.q, self.k, self.v = packed.split([heads, kv_heads, kv_heads], -3)
        self.eps: float = rest.pop("eps", 1e-6)
        self.norm: str = rest.pop("norm", "head")
        self.dims = (-3, -1) if self.norm == "all" else (-1,)
        self.offset: float = rest.pop("offset", 0.0)
        self.weights = q_weight, k_weight
        self.rotation = cos, sin, rest

    def factor(self, index: int) -> Tensor | float:
        """The factor of the normalized queries or keys."""
        weight = self.weights[index]
        if weight is None:
            return 1.0
        return weight.reshape(-1, 1, self.q.shape[-1]) + self.offset  # of each head, or of all

    def rstd(self, x: Tensor) -> Tensor | float:
        """The factor that normalizes heads."""
        if self.norm == "none":
            return 1.0
        return ((x * x).mean(self.dims, keepdim=True) + self.eps).rsqrt()

    def normalized(self, x: Tensor, index: int) -> Tensor:
        """The norm of heads."""
        return x * self.rstd(x) * self.factor(index)

    def results(self, rotate: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Rotated queries and keys, and values."""
        cos, sin, rest = self.rotation
        dtype = self.q.dtype
        q, k = rotate(q, k, cos, sin, **rest)
        return q.to(dtype), k.to(dtype), v


def qkv_reference(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The formula."""
    p = Projection(*args, **kwargs)
    return p.results(reference, p.normalized(p.q, 0), p.normalized(p.k, 1), p.v)


def qkv_magnitude(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The terms of each element; the sum of squares adds a rounding error to each."""
    p = Projection(*args, **kwargs)
    return p.results(magnitude, 3 * p.normalized(p.q, 0), 3 * p.normalized(p.k, 1), p.v.abs())


def qkv_gradient_magnitude(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """A function whose gradients are the terms: |d| + |n| mean |d n|, for d the gradient of n."""
    p = Projection(*args, **kwargs)

    def normalized(x: Tensor, index: int) -> Tensor:
        factor = p.factor(index)
        size = factor.detach().abs() if isinstance(factor, Tensor) else factor
        if p.norm == "none":
            return x * size
        rstd = torch.as_tensor(p.rstd(x.detach()))
        n = (x.detach() * rstd).abs()
        y = 3 * (x + n * (n * x).mean(p.dims, keepdim=True)) * rstd * size
        return y + 3 * n * (factor - factor.detach()) if isinstance(factor, Tensor) else y

    def rotate(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return gradient_magnitude(q, k, *rest, **options)

    return p.results(rotate, normalized(p.q, 0), normalized(p.k, 1), p.v)


def qkv_bench(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], norm: str = "head"
) -> Sample:
    """A projection with a quarter as many heads for the keys, and float32 factors."""
    tokens, elements = shape
    heads = max(elements // HEAD_DIM, 1)
    few = max(heads // 4, 1)
    qkv = torch.randn(1, tokens, (heads + 2 * few) * HEAD_DIM, device=device, dtype=dtype)
    angles = torch.randn(tokens, HEAD_DIM // 2, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    sizes = [heads * HEAD_DIM, few * HEAD_DIM] if norm == "all" else [HEAD_DIM] * 2
    owned = [torch.randn(size, device=device, dtype=dtype) for size in sizes]
    args = (qkv, angles.cos().to(wide), angles.sin().to(wide), *owned, heads, few)
    return Sample("bench", args, {} if norm == "head" else {"norm": norm})


def qkv_bench_variants(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    """One norm of all heads of the queries, and one of the keys."""
    yield "all heads", qkv_bench(device, dtype, shape, "all")


def qkv_large(device: torch.device) -> Sample:
    """Queries of more than 2**31 elements, one token per batch."""
    batch, heads = 2**18 + 1, 65
    row = cycle((heads + 2) * HEAD_DIM, 251, device)
    steps = cycle(batch, 241, device) + 1
    factors = [cycle(batch * 64, length, device).view(batch, 1, 64) for length in (113, 127)]
    owned = [cycle(HEAD_DIM, length, device) for length in (17, 19)]
    qkv = (row * steps.unsqueeze(-1)).unsqueeze(1)
    return Sample("large", (qkv, *factors, *owned, heads, 1))


def qkv_traffic(sample: Sample) -> Traffic:
    """Reads the projection and the factors, writes the heads."""
    qkv, cos, sin = sample.args[:3]
    return Traffic(2 * qkv.nbytes + cos.nbytes + sin.nbytes, 6 * qkv.numel())


def qkv_backward_traffic(sample: Sample) -> Traffic:
    """Reads gradients and the heads of queries and keys, writes the gradient of the projection."""
    qkv, cos, sin, *_, heads, kv_heads = sample.args
    values = qkv.nbytes * kv_heads // (heads + 2 * kv_heads)
    return Traffic(3 * qkv.nbytes - values + cos.nbytes + sin.nbytes, 12 * qkv.numel())


def qkv_invalid(device: torch.device) -> Iterator[Invalid]:
    """Numbers of heads that do not divide the projection, weights without a norm."""
    x, table = torch.ones(2, 4, 40, device=device), torch.ones(4, 4, device=device)
    row = torch.ones(8, device=device)
    args = (x, table, table, row, row, 3, 1)
    good = GoodCall(torch.ops.torchkiln.qkv_norm_rope.default, Sample("good", args))
    for qkv in (x[0, 0], x[None]):
        words = "expected [tokens, elements] or [batch, tokens, elements]"
        yield good.changed(f"qkv: got shape {list(qkv.shape)}, {words}", qkv=qkv)
    for name in ("heads", "kv_heads"):
        words = f"{name}: got 0, expected a number of at least 1"
        yield good.changed(words, ValueError, **{name: 0})
    words = "qkv: got 40 elements per token, expected a multiple of 6, heads + 2 * kv_heads"
    yield good.changed(words, heads=4)
    words = "q_weight: got a tensor beside norm='none', expected None"
    yield good.changed(words, ValueError, norm="none")
    words = "q_weight: got shape [8], expected [24], the elements of all heads"
    yield good.changed(words, norm="all")
    for eps, said in ((-1e-5, "-1e-05"), (math.nan, "nan")):
        words = f"eps: got {said}, expected a number of at least 0"
        yield good.changed(words, ValueError, eps=eps)


QKV_NORM_ROPE = OpSpec(
    op=torchkiln.qkv_norm_rope,
    reference=qkv_reference,
    magnitude=qkv_magnitude,
    gradient_magnitude=qkv_gradient_magnitude,
    inputs=qkv_inputs,
    differentiable=(0, 3, 4),  # cos and sin: tests/ops/test_qkv_norm_rope.py
    refusals=Refusals(
        parameters=dict.fromkeys(("cos", "q_weight", "k_weight"), "qkv"),
        like={"sin": "cos"},
        shapes=dict.fromkeys(("q_weight", "k_weight"), "the elements of a head"),
        words={"norm": ("head", "all", "none")},
    ),
    invalid=qkv_invalid,
    bench=qkv_bench,
    bench_variants=qkv_bench_variants,
    bench_shapes=BENCH_SHAPES,
    small_shapes=SMALL_SHAPES,
    large=qkv_large,
    traffic=qkv_traffic,
    backward_traffic=qkv_backward_traffic,
    opaque=True,
    helpers=("qkv_norm_rope_backward",),
)
