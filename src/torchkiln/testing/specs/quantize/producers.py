"""The contracts of functions with a result in float8_e4m3fn: its dequantised numbers are compared.

A truth rounds the float64 result of the plain op. Near the middle between two numbers of E4M3, the
plain op, whose result is first rounded to its own dtype, may be quantised to the other number. The
composite, which quantises the result of the plain op, then has the same error. Elsewhere only the
right number passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln.testing.compare import outputs
from torchkiln.testing.data import normal
from torchkiln.testing.sample import Sample
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.quantize.layer import (
    BLOCK,
    DTYPES,
    LINEAR_FP8,
    NO_TRANSFORMS,
    SHAPES,
    rounded,
)

Function = Callable[..., Any]
ops = torch.ops.torchkiln


class Straight(torch.autograd.Function):
    """Numbers whose gradient is that of the tensor that was quantised."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, numbers: Tensor) -> Tensor:  # noqa: ARG004
        """The numbers."""
        return numbers.view_as(numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        """The gradient, unchanged."""
        return grad, None


def straight(source: Tensor, numbers: Tensor) -> Tensor:
    """The numbers, with the history of ``source``."""
    found: Tensor = Straight.apply(source, numbers)  # type: ignore[no-untyped-call]
    return found


def numbers_of(result: torchkiln.Quantized) -> Tensor:
    """The numbers of a quantised tensor, with the history and the dtype of its source."""
    source = result.source
    assert source is not None
    return straight(source, torchkiln.dequantize(result, source.dtype))


@dataclass(frozen=True)
class Numbers:
    """Calls a function, and replaces its quantised result by the numbers of the result."""

    function: Function

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The numbers, and the other results if there are any."""
        found = self.function(*args, **kwargs)
        if isinstance(found, torchkiln.Quantized):
            return numbers_of(found)
        return numbers_of(found[0]), *found[1:]


@dataclass(frozen=True)
class Rounded:
    """Calls a function, and rounds its first result to E4M3."""

    function: Function
    numbers: Function | None = None
    """The function whose first result is rounded in place of that of ``function``, which then has
    the gradients alone."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The rounded result, and the other results if there are any."""
        first, *others = outputs(self.function(*args, **kwargs))
        x = first.detach()
        if self.numbers is not None:
            with torch.no_grad():
                x = outputs(self.numbers(*args, **kwargs))[0]
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        found = straight(first, rounded(rows, 1).view(x.shape))
        return (found, *others) if others else found


@dataclass(frozen=True)
class Inputs:
    """The calls of an op whose result has rows of at least one block."""

    parent: OpSpec

    def __call__(self, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        """The calls that a quantising op takes."""
        for call in self.parent.inputs(device, dtype):
            sizes = [a for a in call.args if isinstance(a, (tuple, list))]
            if call.args[0].dim() and all(len(size) == 1 for size in sizes):
                yield call


def quantising(parent: OpSpec, *helpers: str) -> OpSpec:
    """The form of an op that quantises its result, and the helpers that it calls."""
    name = f"{parent.name}_fp8"
    overload = getattr(ops, name, ops._gated_fp8).default
    return replace(
        parent,
        name=name,
        op=Numbers(getattr(torchkiln, name)),
        overload=overload,
        composed=True,
        reference=Rounded(parent.reference),
        composite=Rounded(parent.composite, parent.op),
        inputs=Inputs(parent),
        dtypes=DTYPES,
        refusals=None,
        invalid=None,
        large=None,
        module=None,
        bench_variants=None,
        forms=(),
        opaque=True,
        helpers=(*helpers, "dequantize"),
        excluded={
            **NO_TRANSFORMS,
            "opcheck_helpers": LINEAR_FP8.excluded["opcheck_helpers"],
            "bad_input": "its dtypes are fewer; tests/ops/test_fp8_norms.py, test_fp8_gates.py",
        },
    )


def quantized_forms(x: Tensor) -> tuple[Tensor, ...]:
    """The numbers of a matrix by each function that quantises it: rows, columns, squares."""
    of_rows, of_columns = torchkiln.quantize_both(x)
    _, of_squares = torchkiln.quantize_both(x, square=True)
    weight = torchkiln.quantize_weight(x)
    turned = torchkiln.QuantizedWeight(weight.transposed, weight.transposed_scale, *weight[:2])
    alone = torchkiln.quantize(x)
    both = [torchkiln.transpose_quantized(alone, square=square) for square in (False, True)]
    every: list[Any] = [alone, of_rows, of_columns, of_squares, weight, turned, *both]
    return tuple(torchkiln.dequantize(each, x.dtype) for each in every)


def rounded_forms(x: Tensor) -> tuple[Tensor, ...]:
    """The results of :func:`quantized_forms`, computed by the definition of the scales."""
    rows, columns = rounded(x, 1), x.T.contiguous()
    square = rounded(x, BLOCK)
    turned = rows.T.contiguous()
    of_columns, of_squares = rounded(columns, 1), rounded(columns, BLOCK)
    again = (rounded(turned, 1), rounded(turned, BLOCK))
    return (rows, rows, of_columns, of_squares, square, square.T, *again)


def matrices(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Matrices of one block, of several, of parts of blocks, and without elements."""
    for name, (shape, _) in SHAPES.items():
        if len(shape) == 2:
            yield Sample(name, (normal("x", shape, device, dtype),))


QUANTIZE = replace(
    LINEAR_FP8,
    name="quantize",
    op=quantized_forms,
    overload=ops.quantize.default,
    reference=rounded_forms,
    composite=rounded_forms,
    magnitude=lambda x: tuple(torch.zeros_like(y) for y in rounded_forms(x)),
    gradient_magnitude=None,
    inputs=matrices,
    differentiable=(),
    invalid=None,
    bench_variants=None,
    module=None,
    autocast=(),
    threads_matter=False,
    helpers=("quantize", "quantize_both", "quantize_weight", "transpose_quantized", "dequantize"),
    excluded={
        "vmap": NO_TRANSFORMS["vmap"],
        "opcheck_helpers": LINEAR_FP8.excluded["opcheck_helpers"],
        "bad_input": "the form has several functions; tests/ops/test_quantize.py",
    },
)


def gate(packed: Tensor) -> Tensor:
    """``swiglu`` of gate and up side by side."""
    first, second = packed.chunk(2, -1)
    return F.silu(first) * second


def gated_reference(x: Tensor, weight: Tensor) -> Tensor:
    """The gate of the layer."""
    return gate(LINEAR_FP8.reference(x, weight))


def gated_parts(x: Tensor, weight: Tensor) -> Tensor:
    """The gate of the layer, by two ops."""
    return numbers_of(torchkiln.swiglu_fp8(torchkiln.linear_fp8(x, weight)))


def gated_magnitude(x: Tensor, weight: Tensor) -> Tensor:
    """The terms of one half times the other half."""
    (first, second), (first_terms, second_terms) = (
        function(x, weight).chunk(2, -1)
        for function in (LINEAR_FP8.reference, LINEAR_FP8.magnitude)
    )
    return first_terms * second.detach().abs() + second_terms * first.detach().abs()


def gated_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The calls of the layer with an even number of output features, without a bias."""
    for call in LINEAR_FP8.inputs(device, dtype):
        x, weight = call.args[:2]
        if len(call.args) == 3 and len(weight) % 2 == 0:
            yield replace(call, args=(x, weight))


GATED_LINEAR = replace(
    LINEAR_FP8,
    name="gated_linear_fp8",
    op=Numbers(torchkiln.gated_linear_fp8),
    overload=ops.gated_linear_fp8.default,
    reference=Rounded(gated_reference),
    composite=gated_parts,
    magnitude=gated_magnitude,
    gradient_magnitude=gated_magnitude,
    inputs=gated_inputs,
    differentiable=(0, 1),
    invalid=None,
    bench_variants=None,
    module=None,
    devices=("cpu",),  # products of two dtypes round differently; tests/ops/test_fp8_gates.py
    helpers=("gated_linear_fp8", "_gated_fp8_backward"),
    excluded={
        **LINEAR_FP8.excluded,
        "bad_input": "tests/ops/test_fp8_gates.py has the errors that linear_fp8 has not",
    },
)
