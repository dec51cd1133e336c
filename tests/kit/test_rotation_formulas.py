"""The proof that a function computes a rotary position embedding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rotations import FUNCTIONS, as_llama
from torch import Tensor

from torchkiln.patch.formula import rotation, rotation_proof
from torchkiln.patch.formula.terms import NoFormulaError

SCALE = torch.ones(1)
"""A tensor that a function reads without getting it as an argument."""


def proofs(function: Any) -> dict[tuple[int, int], rotation.Rotation]:
    return rotation_proof.Prover(function, function).rotations()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_formulas(function: Callable[..., Any]) -> None:
    """The proof finds dimension of heads, order of pairs, columns of cos, rotated part, layout."""
    found = proofs(function)
    settings = {ranks: (*one.form, one.is_partial, one.is_dense) for ranks, one in found.items()}
    assert settings == FUNCTIONS[function]


def test_a_constant_names_the_dimension_of_the_heads() -> None:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return as_llama(q, k, cos, sin, 2)

    found = rotation_proof.Prover(rotate, as_llama).rotations()  # type: ignore[arg-type]
    assert {ranks: one.form.heads_dim for ranks, one in found.items()} == {(4, 3): -2}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounds_once_and_is_as_close_to_float64(
    function: Callable[..., Any], dtype: torch.dtype
) -> None:
    for ranks, one in proofs(function).items():
        for dtypes in (pair for pair in one.dtypes if pair[0] == dtype):
            size = rotation.Sizes(2, 8, 4, 64, 64, 64)
            given = rotation.sample(one.form, ranks, size).cast(dtypes)
            truth = one.rotated(*given.cast((torch.float64, torch.float64)))
            for was, now, exact in zip(function(*given), one.rotated(*given), truth, strict=True):
                assert was.dtype == now.dtype == dtype
                once = exact.to(dtype)
                errors = [float((x.double() - exact).square().mean()) for x in (was, now, once)]
                assert errors[1] <= errors[0] * 1.001
                if dtype != torch.float32:
                    assert errors[1] <= errors[2] * 1.001


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("order", rotation.ORDERS)
def test_results_have_the_layout_of_the_function(function: Callable[..., Any], order: str) -> None:
    for ranks, one in proofs(function).items():
        given = rotation.sample(one.form, ranks, rotation.WHOLE[0], order=order)
        found, expected = one.rotated(*given), function(*given)
        assert [x.stride() for x in found] == [x.stride() for x in expected]


def clamped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q.clamp(-1e5, 1e5), k, cos, sin)


def scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = as_llama(q, k, cos, sin)
    return q * 1.0, k


def of_a_size(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if q.shape[1] > 100:
        return q, k
    return as_llama(q, k, cos, sin)


def of_a_part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q[..., :128], k, cos, sin)


def of_a_tuple(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama((q, k)[q.shape[1] // 99], k, cos, sin)


def of_a_device(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama((q, k)[q.is_cuda], k, cos, sin)


def detached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q, k.detach(), cos, sin)


def without_gradients(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return as_llama(q, k, cos, sin)


def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q, k, cos, -sin)


def rounded(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q.bfloat16().to(q.dtype), k, cos, sin)


def with_a_global(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = as_llama(q, k, cos, sin)
    return q * SCALE, k


def in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q, k, cos.neg_().neg_(), sin)


def without_dimensions(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q.squeeze(), k, cos, sin)


def of_bits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q.view(torch.int64).view(q.dtype), k, cos, sin)


def written(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return as_llama(q, k, torch.neg(torch.neg(cos), out=torch.neg(cos)), sin)


def of_three(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return (*as_llama(q, k, cos, sin), q)


OTHERS = {
    clamped: "it calls clamp",
    scaled: "it computes with a number",
    of_a_size: "it has a branch",
    of_a_part: "a constant that may be a size",
    of_a_tuple: "it has a branch",
    of_a_device: "it has a branch",
    detached: "it calls detach",
    without_gradients: "it calls _NoParamDecoratorContextManager",
    backwards: "it computes another formula",
    rounded: "it makes a copy in another dtype",
    with_a_global: "it uses a tensor that is no argument",
    in_place: "it calls neg_",
    without_dimensions: "it calls squeeze",
    of_bits: "it reads bits in another dtype",
    written: "it writes to a tensor",
    of_three: "it computes another formula",
}


@pytest.mark.parametrize("function", OTHERS)
def test_other_formulas_stay(function: Callable[..., Any]) -> None:
    with pytest.raises(NoFormulaError, match=OTHERS[function]):
        proofs(function)


def test_the_sizes_that_are_tried_differ() -> None:
    for sizes in itertools.chain([rotation.WHOLE, rotation.PARTIAL]):
        assert all(a != b for a, b in zip(*sizes, strict=True))
