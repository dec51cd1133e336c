"""The contract of norms and a rotary embedding of a packed projection, and of its cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.data import cycle, normal
from torchkiln.testing.forms import Given, Written, form_of
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.rope.rope import (
    BENCH_SHAPES,
    HEAD_DIM,
    SMALL_SHAPES,
    gradient_magnitude,
    magnitude,
    reference,
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
    """A call; ``counts`` are the heads of queries, the heads of keys, the elements of a head."""
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
    """Calls for head sizes of every team of threads, parts of heads, tables, each kind of norm."""

    def sample(name: str, lead: tuple[int, ...], counts: tuple[int, int, int], **r: Any) -> Sample:
        return qkv_call(name, lead, counts, device, dtype, **r)

    yield sample("typical", (2, 4), (3, 1, 8), cos=(4, 4))
    yield sample("no batch", (5,), (4, 2, 64), cos=(5, 32))
    yield sample("doubled", (2, 3), (5, 2, 128), cos=(3, 128))
    yield sample("interleaved", (2, 3), (2, 1, 96), cos=(1, 3, 48), interleaved=True)
    yield sample("no weights", (2, 3), (2, 1, 16), cos=(2, 3, 8), has_weights=False)
    yield sample("no norm", (2, 3), (2, 3, 32), cos=(3, 16), has_weights=False, norm="none")
    yield sample("offset", (2, 3), (2, 1, 80), cos=(3, 40), offset=1.0, eps=1e-5)
    yield sample("part", (1, 5), (2, 1, 80), cos=(5, 16), rotary_dim=32)
    yield sample("odd heads", (1, 3), (3, 2, 21), cos=(3, 5), rotary_dim=10)
    yield sample("all heads", (2, 3), (4, 2, 64), cos=(3, 32), norm="all", offset=0.5)
    yield sample("all heads, odd", (2, 3), (3, 2, 21), cos=(3, 5), rotary_dim=10, norm="all")
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

    def __init__(
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
        # the weight of all heads, or a row per head
        return weight.reshape(-1, 1, self.q.shape[-1]) + self.offset

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
    """The formula of the op in plain torch."""
    p = Projection(*args, **kwargs)
    return p.results(reference, p.normalized(p.q, 0), p.normalized(p.k, 1), p.v)


def qkv_magnitude(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The magnitude of each element, times 3 for the rounding errors of the norm."""
    p = Projection(*args, **kwargs)
    return p.results(magnitude, 3 * p.normalized(p.q, 0), 3 * p.normalized(p.k, 1), p.v.abs())


def qkv_gradient_magnitude(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """A function whose gradients are |d| + |n| mean |d n|, for d the gradient of n."""
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

    def rotate(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        return gradient_magnitude(q, k, *rest, **options)

    return p.results(rotate, normalized(p.q, 0), normalized(p.k, 1), p.v)


def qkv_bench(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], norm: str = "head"
) -> Sample:
    """A call with a projection of 4 query heads per key head, and float32 cos and sin."""
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
    """The benchmark call with one norm over all heads of queries, and one of keys."""
    yield "all heads", qkv_bench(device, dtype, shape, "all")


def qkv_large(device: torch.device) -> Sample:
    """A call with queries of more than 2**31 elements, one token per batch."""
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
    """Calls with numbers of heads that do not divide the projection, or weights but no norm."""
    x, table = torch.ones(2, 4, 40, device=device), torch.ones(4, 4, device=device)
    row = torch.ones(8, device=device)
    args = (x, table, table, row, row, 3, 1)
    good = GoodCall(torch.ops.torchkiln.qkv_norm_rope.default, Sample("good", args))
    for qkv in (x[0, 0], x[None]):
        words = "expected [tokens, elements] or [batch, tokens, elements]"
        yield good.changed(f"qkv: got shape {list(qkv.shape)}, {words}", qkv=qkv)
    for name in ("num_heads", "num_kv_heads"):
        words = f"{name}: got 0, expected a number of at least 1"
        yield good.changed(words, ValueError, **{name: 0})
    words = "qkv: got 40 elements per token, expected a multiple of 6, num_heads + 2 * num_kv_heads"
    yield good.changed(words, num_heads=4)
    words = "q_weight: got a tensor beside norm='none', expected None"
    yield good.changed(words, ValueError, norm="none")
    words = "q_weight: got shape [8], expected [24], the elements of all heads"
    yield good.changed(words, norm="all")
    for eps, said in ((-1e-5, "-1e-05"), (math.nan, "nan")):
        words = f"eps: got {said}, expected a number of at least 0"
        yield good.changed(words, ValueError, eps=eps)


FILL = 7.0
"""The value of all cache elements before the call."""


def new_cache(given: Given) -> Tensor:
    """A cache with room for 2 more tokens, or with positions for every row of the tables."""
    qkv, cos = given["qkv"], given["cos"]
    if qkv.dim() < 2 or qkv.layout != torch.strided:  # the op refuses them
        return torch.empty(0)
    *batch, tokens, elements = qkv.shape
    size = elements // (given["num_heads"] + 2 * given["num_kv_heads"])
    length = tokens + 2 if given.get("positions") is None else cos.shape[0]
    cache: Tensor = qkv.new_full((*batch, given["num_kv_heads"], length, size), FILL)
    return cache


def fill_cache(*, keys: Tensor, values: Tensor, **given: Any) -> tuple[Tensor, ...]:
    """The op with the cache as two keyword arguments."""
    found: tuple[Tensor, ...] = torchkiln.qkv_norm_rope(**given, cache=(keys, values))
    return found


def filled(function: Callable[..., tuple[Tensor, ...]], *args: Any, **kwargs: Any) -> Any:
    """The function's queries, and caches to which its keys and values are written."""
    names = ("qkv", "cos", "sin", "q_weight", "k_weight", "num_heads", "num_kv_heads")
    given = {**dict(zip(names, args, strict=True)), **kwargs}
    q, *rows = function(*args, **kwargs)
    tokens = rows[0].shape[-2]
    places = kwargs.get("positions")
    places = torch.arange(tokens, device=q.device) if places is None else places.long()
    at = places.unsqueeze(-1)
    at = at.unsqueeze(1) if places.dim() == 2 else at
    return q, *(new_cache(given).scatter(-2, at.expand_as(each), each) for each in rows)


def with_cache(parent: OpSpec) -> OpSpec:
    """The op that writes keys and values into a cache."""

    def one_token_a_place(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for call in parent.inputs(device, dtype):
            places = call.kwargs.get("positions")
            if places is None:
                yield call
            else:
                yield replace(call, kwargs={**call.kwargs, "positions": PLACES.to(device)})

    function = Written(
        fill_cache,
        torch.ops.torchkiln._qkv_norm_rope_cache.default,
        {"keys": new_cache, "values": new_cache},
        plain=partial(filled, torchkiln.qkv_norm_rope),
        layouts=("contiguous", "offset by one element", "rows of a wider matrix"),
    )
    return form_of(
        parent,
        function,
        called=parent.name,
        kinds=False,
        inputs=one_token_a_place,
        reference=partial(filled, qkv_reference),
        composite=partial(filled, qkv_reference),
        magnitude=partial(filled, qkv_magnitude),
    )


PLACES = torch.tensor([[4, 0, 2, 10], [10, 3, 1, 9]])
"""A different position in the cache for each token of a sequence, not ascending."""

QKV_NORM_ROPE = OpSpec(
    op=torchkiln.qkv_norm_rope,
    reference=qkv_reference,
    magnitude=qkv_magnitude,
    gradient_magnitude=qkv_gradient_magnitude,
    inputs=qkv_inputs,
    differentiable=(0, 3, 4),  # tests/ops/test_qkv_norm_rope.py tests cos and sin
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
    helpers=("_qkv_norm_rope_backward",),
)
