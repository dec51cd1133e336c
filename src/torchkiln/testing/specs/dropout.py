"""The contracts of dropout and residual sum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec

# Shapes of x, from the scalar loop to several threads or blocks, each with a probability.
SHAPES: Mapping[str, tuple[tuple[int, ...], float]] = (
    {"typical": ((6, 10), 0.4), "one": ((1,), 0.5), "empty": ((0,), 0.5)}
    | {"no rows": ((0, 5), 0.5), "no columns": ((5, 0), 0.5), "prime": ((7, 13), 0.1)}
    | {"vector less one": ((3, 127), 0.25), "vector": ((3, 128), 0.25)}
    | {"vector and one": ((3, 129), 0.25), "power of two and one": ((1025,), 0.9)}
    | {"images": ((2, 3, 5, 7), 0.5), "rank 9": ((2, 1, 2, 3, 1, 2, 1, 2, 3), 0.5)}
    | {"many narrow rows": ((4099, 3), 0.3), "threads": ((257, 261), 0.2)}
)

BY_RANDOMNESS = (
    "the argument `randomness` of vmap decides how random numbers are drawn; "
    "tests/ops/test_dropout.py tests each choice"
)
BY_INDEX = (
    "the mask of an element depends on its index, so the rows of a large call have another mask in "
    "a small call; tests/ops/test_dropout.py tests the mask"
)
EXCLUDED = {
    "vmap": BY_RANDOMNESS,
    "vmap_of_grad": BY_RANDOMNESS,
    "graph_capture": "a generator cannot be seeded while a graph is captured; "
    "tests/ops/test_dropout.py replays a graph",
    "more_than_2_to_the_31_elements": BY_INDEX,
    "gradients_of_more_than_2_to_the_31_elements": BY_INDEX,
    "calls_from_several_threads": "threads draw from one generator, so the results of each depend "
    "on their order",
}


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape and its probability, then calls that drop nothing or everything."""
    for seed, (name, (shape, p)) in enumerate(SHAPES.items()):
        pair = normal("x", shape, device, dtype), normal("residual", shape, device, dtype)
        yield Sample(name, (*pair, p), seed=seed)
    pair = normal("x", (5, 9), device, dtype), normal("residual", (5, 9), device, dtype)
    yield Sample("no p", pair, seed=40)
    yield Sample("nothing dropped", (*pair, 0.0), seed=41)
    yield Sample("all dropped", (*pair, 1.0), seed=42)
    yield Sample("not training", (*pair, 0.4, False), seed=43)
    yield Sample("not training by keyword", pair, {"p": 0.4, "training": False}, seed=44)
    other = torch.float32 if dtype.itemsize == 2 else torch.bfloat16
    mixed = normal("x", (9, 21), device, dtype), normal("residual", (9, 21), device, other)
    yield Sample("two dtypes", (*mixed, 0.3), seed=47)


def bias_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The calls of ``inputs`` with a bias, which is float32 in some calls with half precision."""
    for sample in inputs(device, dtype):
        yield with_bias(sample, dtype)
    if dtype in (torch.float16, torch.bfloat16):
        pair = normal("x", (6, 9), device, dtype), normal("residual", (6, 9), device, dtype)
        for seed, name, options in (
            (45, "float32 bias", (0.3,)),
            (46, "float32 bias, not training", (0.3, False)),
        ):
            yield with_bias(Sample(name, (*pair, *options), seed=seed), torch.float32)


def with_bias(sample: Sample, dtype: torch.dtype) -> Sample:
    """The call of the op that adds a bias."""
    x, *others = sample.args
    bias = normal("bias", x.shape[-1:], x.device, dtype)
    return replace(sample, args=(x, bias, *others))


def kept(x: Tensor, p: float, training: bool) -> Tensor:
    """``x * mask / (1 - p)`` with the mask that the op draws at the current generator state.

    A call of the op itself gives the mask, which depends only on that state, on p and on the index
    of an element. tests/ops/test_dropout.py tests the distribution of masks.
    """
    if not training:
        return x
    with torch.no_grad():
        ones = torch.ones(x.shape, device=x.device)
        mask = torchkiln.dropout_add(ones, torch.zeros_like(ones), p) != 0
    return torch.where(mask, x / (1 - p) if p < 1 else x, 0)


def dropout_add(x: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """The formula of the op in plain torch."""
    return kept(x, p, training) + residual


def bias_dropout_add(
    x: Tensor, bias: Tensor, residual: Tensor, p: float = 0.5, training: bool = True
) -> Tensor:
    """The formula of the op in plain torch."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return dropout_add(x + bias, residual, p, training).to(dtype)


def magnitude(x: Tensor, residual: Tensor, *options: Any, **kwargs: Any) -> Tensor:
    """The magnitude of each sum."""
    return dropout_add(x.abs(), residual.abs(), *options, **kwargs)


def bias_magnitude(x: Tensor, bias: Tensor, *others: Any, **kwargs: Any) -> Tensor:
    """The magnitude of each sum."""
    return magnitude(x.abs() + bias.abs(), *others, **kwargs)


def invalid(has_bias: bool, device: torch.device) -> Iterator[Invalid]:
    """Calls with p out of range, with and without training; a 0-dimensional x with a bias."""
    x = torch.ones(2, 4, device=device)
    good = GoodCall(torch.ops.torchkiln.dropout_add.default, Sample("good", (x, x)))
    if has_bias:
        sample = with_bias(good.sample, x.dtype)
        good = GoodCall(torch.ops.torchkiln.bias_dropout_add.default, sample)
        words = "x: got a 0-dimensional tensor, expected at least 1 dimension"
        yield good.changed(words, x=x[0, 0], residual=x[0, 0])
    for p in (1.5, -0.1, math.nan):
        words = f"p: got {p}, expected a probability between 0 and 1"
        for training in (True, False):
            yield good.changed(words, ValueError, p=p, training=training)


def bench(
    has_bias: bool, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Sample:
    """A call with two matrices of one shape, and a row for the bias."""
    x, residual = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    bias = [torch.randn(shape[1:], device=device, dtype=dtype)] if has_bias else []
    return Sample("bench", (x, *bias, residual, 0.1))


def backward_traffic(sample: Sample) -> Traffic:
    """Traffic that reads the incoming gradient, and writes the gradients of x and bias."""
    x, *bias, _ = sample.take(sample.positions)
    return Traffic(2 * x.nbytes + sum(t.nbytes for t in bias), 2 * x.numel())


COMMON: dict[str, Any] = {
    "operations": (3, 2),
    "backward_traffic": backward_traffic,
    "opaque": True,
    "helpers": ("_dropout_state", "_dropout_add_with_state", "_dropout_add_backward"),
    "excluded": EXCLUDED,
}

DROPOUT_ADD = OpSpec(
    op=torchkiln.dropout_add,
    reference=dropout_add,
    magnitude=magnitude,
    inputs=inputs,
    refusals=Refusals(like={"residual": "x"}, mixes=("residual",)),
    invalid=partial(invalid, False),
    bench=partial(bench, False),
    module=layer(torchkiln.nn.DropoutAdd, 0.3),
    **COMMON,
)

BIAS_DROPOUT_ADD = OpSpec(
    op=torchkiln.bias_dropout_add,
    reference=bias_dropout_add,
    magnitude=bias_magnitude,
    inputs=bias_inputs,
    refusals=Refusals(
        like={"residual": "x"},
        mixes=("residual",),
        parameters={"bias": "x"},
        shapes={"bias": "the last dimension of x"},
    ),
    invalid=partial(invalid, True),
    bench=partial(bench, True),
    module=layer(torchkiln.nn.BiasDropoutAdd, 10, 0.3),
    **COMMON,
)
