"""qkv_norm_rope(cache=): the pass that rotates also writes keys and values into a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dtypes import FLOATING
from torch import Tensor

import torchkiln

BATCH, TOKENS, LENGTH, HEADS, KV_HEADS = 2, 3, 9, 5, 2
UNTOUCHED = 7.0


class Case:
    """A projection, tables, weights, and a cache in which each element is ``UNTOUCHED``."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype = torch.float32, size: int = 64
    ) -> None:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.float64).to(dtype)

        self.size, self.rotated = size, size - size % 2
        self.qkv = drawn(BATCH, TOKENS, (HEADS + 2 * KV_HEADS) * size)
        self.tables = drawn(LENGTH, self.rotated // 2), drawn(LENGTH, self.rotated // 2)
        self.weights = drawn(size), drawn(size)
        self.all_weights = drawn(HEADS * size), drawn(KV_HEADS * size)
        self.keys, self.values = (
            torch.full((BATCH, KV_HEADS, LENGTH, size), UNTOUCHED, device=device, dtype=dtype)
            for _ in range(2)
        )

    def __call__(self, *, qkv: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
        """Calls the op; without positions the first rows of the tables belong to the tokens."""
        tables = options.pop("tables", None) or self.tables
        if options.get("positions") is None and tables[0].dim() == 2:
            tables = tuple(t[:TOKENS] for t in tables)
        weights = {"none": (None, None), "head": self.weights, "all": self.all_weights}
        q_weight, k_weight = weights[options.get("norm", "head")]
        given = self.qkv if qkv is None else qkv
        rest: dict[str, Any] = {"rotary_dim": self.rotated if self.size % 2 else None} | options
        cos, sin = tables
        return torchkiln.qkv_norm_rope(given, cos, sin, q_weight, k_weight, HEADS, KV_HEADS, **rest)

    def check(self, positions: Tensor | None, **options: Any) -> None:
        """The cache has the keys and values that the op returns without it, and no other change."""
        cache = self.keys, self.values
        q, k, v = self(positions=positions, **options)
        found = self(positions=positions, cache=cache, **options)
        assert found[1] is cache[0]
        assert found[2] is cache[1]
        assert torch.equal(found[0], q)
        places = torch.arange(TOKENS, device=q.device) if positions is None else positions.long()
        for written, new in zip(cache, (k, v), strict=True):
            expected = torch.full_like(written, UNTOUCHED)
            for sequence, rows in enumerate(places.expand(BATCH, TOKENS)):
                expected[sequence, :, rows] = new[sequence]
            assert torch.equal(written, expected)


def rows(device: torch.device, kind: str) -> Tensor | None:
    """Positions of the tokens: none, shared by all sequences, or separate for each."""
    if kind == "none":
        return None
    each = torch.tensor([[4, 0, 8], [2, 7, 3]], device=device)
    return {
        "shared": each[0],
        "each": each,
        "int32": each.int(),
        "strided": each.t().contiguous().t(),
    }[kind]


@pytest.mark.parametrize("kind", ["none", "shared", "each", "int32", "strided"])
@pytest.mark.parametrize("size", [64, 21])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_writes_what_the_op_returns(
    device: torch.device, dtype: torch.dtype, size: int, kind: str
) -> None:
    Case(device, dtype, size).check(rows(device, kind))


@pytest.mark.parametrize(
    "options",
    [{"norm": "none"}, {"norm": "all"}, {"interleaved": True}, {"offset": 1.0, "eps": 1e-3}],
    ids=str,
)
@pytest.mark.parametrize("size", [64, 21])
def test_options(device: torch.device, size: int, options: dict[str, Any]) -> None:
    Case(device, size=size).check(rows(device, "each"), **options)


@pytest.mark.parametrize("layout", ["tokens first", "packed", "part"])
@pytest.mark.parametrize("size", [64, 21])
def test_any_strides(device: torch.device, layout: str, size: int) -> None:
    case = Case(device, torch.bfloat16, size)
    if layout == "tokens first":
        case.keys, case.values = (
            t.transpose(1, 2).contiguous().transpose(1, 2) for t in (case.keys, case.values)
        )
    elif layout == "packed":  # keys and values alternate
        both = torch.cat([case.keys, case.values], -1)
        case.keys, case.values = both[..., :size], both[..., size:]
    else:  # parts of a larger buffer, at odd elements
        wide = torch.full((BATCH, KV_HEADS, LENGTH, size + 3), UNTOUCHED, device=device)
        case.keys = wide.bfloat16()[..., 1 : size + 1]
    case.check(rows(device, "each"))


@pytest.mark.parametrize("outside", [-1, LENGTH, 2**40, -(2**40)])
@pytest.mark.parametrize("size", [64, 21])
@pytest.mark.parametrize("norm", ["head", "all"])
def test_a_token_outside_of_the_cache_is_left_out(
    device: torch.device, outside: int, size: int, norm: str
) -> None:
    """Positions outside write nothing, before or after the cache; other tokens are written."""
    case = Case(device, size=size)
    guarded = [t.expand(3, *t.shape).clone() for t in (case.keys, case.values)]
    places = torch.tensor([5, outside, 1], device=device)
    q, k, v = case(positions=places, norm=norm)
    found = case(positions=places, norm=norm, cache=(guarded[0][1], guarded[1][1]))
    assert torch.equal(found[0][:, :, ::2], q[:, :, ::2])
    assert found[0][:, :, 1, : case.rotated].isnan().all()  # outside of the tables: NaN
    for written, new in zip(guarded, (k, v), strict=True):
        expected = torch.full_like(written, UNTOUCHED)
        expected[1, :, :, places[::2]] = new[:, :, ::2]
        assert torch.equal(written, expected)


def test_factors_of_each_token(device: torch.device) -> None:
    """With cos and sin per token, positions only select rows of the cache, as in a ring."""
    case = Case(device)
    given = torch.tensor([[40, 2, 31], [17, 9, 0]], device=device)
    angles = torch.randn(50, 32, device=device)[given]
    tables = angles.cos(), angles.sin()
    q, k, v = case(tables=tables)
    places = torch.tensor([[8, 0, -1], [3, 4, 5]], device=device)
    found = case(tables=tables, positions=places, cache=(case.keys, case.values))
    assert torch.equal(found[0], q)
    for written, new in zip(found[1:], (k, v), strict=True):
        expected = torch.full_like(written, UNTOUCHED)
        expected[0, :, places[0, :2]] = new[0, :, :2]
        expected[1, :, places[1]] = new[1]
        assert torch.equal(written, expected)


def test_without_a_batch_and_without_tokens(device: torch.device) -> None:
    case = Case(device)
    places = rows(device, "shared")
    q, k, v = case(qkv=case.qkv[0], positions=places)
    found = case(qkv=case.qkv[0], positions=places, cache=(case.keys[0], case.values[0]))
    assert torch.equal(found[0], q)
    for written, new in zip(found[1:], (k, v), strict=True):
        assert torch.equal(written[:, places], new)
    before = case.keys.clone()
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    case(qkv=case.qkv[:, :0], positions=nothing, cache=(case.keys, case.values))
    assert torch.equal(case.keys, before)


CASE = Case(torch.device("cpu"))
KEYS, VALUES = CASE.keys, CASE.values


@pytest.mark.parametrize(
    ("cache", "positions", "words"),
    [
        ((KEYS.double(), VALUES), None, "keys: got dtype float64, expected float32"),
        ((KEYS, VALUES.half()), None, "values: got dtype float16, expected float32"),
        ((KEYS[0], VALUES), None, "keys: got shape [2, 9, 64], expected [2, 2, length, 64]"),
        ((KEYS[:1], VALUES), None, "keys: got shape [1, 2, 9, 64]"),
        ((KEYS[:, :1], VALUES), None, "keys: got shape [2, 1, 9, 64]"),
        ((KEYS, VALUES[..., :62]), None, "values: got shape [2, 2, 9, 62]"),
        ((KEYS, VALUES[:, :, :8]), None, "values: got shape [2, 2, 8, 64], expected [2, 2, 9, 64]"),
        ((KEYS.mT.contiguous().mT, VALUES), None, "expected 1 in the last dimension"),
        ((KEYS[:, :, :2], VALUES[:, :, :2]), None, "keys: got a length of 2, expected at least 3"),
        ((KEYS, KEYS), None, "memory location"),
        ((KEYS[:1].expand(2, -1, -1, -1), VALUES), None, "memory location"),
        ((KEYS, VALUES), torch.zeros(3), "positions: got dtype float32, expected int64 or int32"),
        ((KEYS, VALUES), torch.zeros(4, dtype=torch.int64), "positions: got shape [4], expected"),
    ],
)
def test_refused_calls(cache: tuple[Tensor, Tensor], positions: Tensor | None, words: str) -> None:
    with pytest.raises(RuntimeError) as error:
        CASE(cache=cache, positions=positions)
    assert words in str(error.value)
    assert "torchkiln.qkv_norm_rope: " in str(error.value) or words == "memory location"
    assert (KEYS == UNTOUCHED).all()


def test_places_of_each_token_are_checked_beside_their_factors() -> None:
    tables = torch.ones(BATCH, TOKENS, 32), torch.ones(BATCH, TOKENS, 32)
    wrong = torch.zeros(3, 3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"\[2, 3\], a place in the cache for each token"):
        CASE(tables=tables, cache=(KEYS, VALUES), positions=wrong)


def test_compiled_calls(device: torch.device) -> None:
    """A compiled graph with two writes, each followed by a read, agrees with eager calls."""

    def steps(
        call: Callable[..., tuple[Tensor, ...]], keys: Tensor, values: Tensor, places: Tensor
    ) -> list[Tensor]:
        found = []
        for step in range(2):
            q, k, v = call(positions=places + step, cache=(keys, values))
            found += [q, k * 2, v + 1]
        return found

    case = Case(device)
    places = torch.tensor([0, 3, 6], device=device)
    copies = case.keys.clone(), case.values.clone()
    expected = steps(case, case.keys, case.values, places)
    found = torch.compile(steps, backend="aot_eager", fullgraph=True)(case, *copies, places)
    for one, other in zip((*found, *copies), (*expected, case.keys, case.values), strict=True):
        assert torch.equal(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [64, 21])
def test_a_captured_graph_follows_the_positions(size: int) -> None:
    """Replays read changed positions, also one outside of the cache, from device memory."""
    device = torch.device("cuda")
    case = Case(device, torch.bfloat16, size)
    places = torch.zeros(BATCH, TOKENS, dtype=torch.int64, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case(positions=places, cache=(case.keys, case.values))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, *_ = case(positions=places, cache=(case.keys, case.values))
    case.keys.fill_(UNTOUCHED)
    case.values.fill_(UNTOUCHED)
    expected = [t.clone() for t in (case.keys, case.values)]
    for start in (0, 3, 6, LENGTH):
        case.qkv.normal_()
        places.copy_(start + torch.arange(TOKENS, device=device))
        graph.replay()
        new = case(positions=places)
        if start < LENGTH:
            assert torch.equal(q, new[0])
            for written, each in zip(expected, new[1:], strict=True):
                written[:, :, start : start + TOKENS] = each
        assert torch.equal(case.keys, expected[0])
        assert torch.equal(case.values, expected[1])


@pytest.mark.cuda
def test_only_the_queries_are_allocated() -> None:
    case = Case(torch.device("cuda"))
    places = torch.zeros(BATCH, TOKENS, dtype=torch.int64, device="cuda")
    case(positions=places, cache=(case.keys, case.values))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    q, *_ = case(positions=places, cache=(case.keys, case.values))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    assert q.shape == (BATCH, HEADS, TOKENS, 64)
