"""The check of ops that write into their argument, shown ops that break it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchkiln import testing
from torchkiln.testing.contract import CHECKS
from torchkiln.testing.data import normal
from torchkiln.testing.specs.pointwise import ADD

CPU = torch.device("cpu")
SHAPES = {"typical": (6, 10), "one": (1,), "0-dim": (), "empty": (0, 3), "odd": (7, 13)}

Op = Callable[..., Tensor]
relu_: Op = torch.relu_


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[testing.Sample]:
    for name, shape in SHAPES.items():
        x = normal("x", shape, device, dtype)
        yield testing.Sample(name, (x + x.sign() / 4,))


RELU = dataclasses.replace(
    ADD,
    name="relu",
    op=torch.relu,
    overload=torch.ops.aten.relu.default,
    inplace=relu_,
    inplace_overload=torch.ops.aten.relu_.default,
    reference=torch.relu,
    composite=torch.relu,
    magnitude=torch.abs,
    inputs=inputs,
    differentiable=(0,),
)


def run(op: Op, dtype: torch.dtype = torch.float32) -> None:
    spec = dataclasses.replace(RELU, inplace=op)
    testing.Case(spec, CHECKS["in_place"], CPU, dtype).run()


@pytest.mark.parametrize("dtype", RELU.dtypes, ids=str)
def test_torch_keeps_the_contract(dtype: torch.dtype) -> None:
    run(relu_, dtype)


def returns_a_copy(x: Tensor) -> Tensor:
    return relu_(x).clone()


def writes_nothing(x: Tensor) -> Tensor:
    torch.relu(x)
    return x


def writes_what_lies_between(x: Tensor) -> Tensor:
    relu_(x)
    if x.dim() == 2 and x.stride(-1) == 2 and x.shape[-1] > 1:
        x.detach().as_strided((x.shape[-1] - 1,), (2,), x.storage_offset() + 1).zero_()
    return x


def hides_the_change(x: Tensor) -> Tensor:
    if x.requires_grad:
        return relu_(x)
    x.data.copy_(torch.relu(x))
    return x


class Marked(torch.autograd.Function):
    """Right in the first order alone, and only where `factor` is 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        relu_(x)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.clone())
        ctx.factor = factor
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors
        return torch.where(output > 0, grad * ctx.factor, 0), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (output,) = ctx.saved_tensors
        return tangent.mul_(output > 0)


def marked(x: Tensor, factor: float) -> Tensor:
    if x.is_leaf or not x.requires_grad:
        return relu_(x)
    return Marked.apply(x, factor)  # type: ignore[no-untyped-call]


def wrong_gradient(x: Tensor) -> Tensor:
    return marked(x, 1.01)


def no_second_gradient(x: Tensor) -> Tensor:
    return marked(x, 1.0)


def writes_to_leaves(x: Tensor) -> Tensor:
    if x.is_leaf and x.requires_grad:
        x.data.relu_()
        return x
    return relu_(x)


def writes_where_elements_overlap(x: Tensor) -> Tensor:
    if x.dim() == 2 and x.stride(0) == 0 and x.shape[0] > 1:
        relu_(x[:1])
        return x
    return relu_(x)


def forgets_the_base(x: Tensor) -> Tensor:
    relu_(x.detach() if x.requires_grad and x._is_view() and not x.is_leaf else x)
    return x


@pytest.mark.parametrize(
    ("op", "words", "dtype"),
    [
        (returns_a_copy, "returned another tensor", torch.float32),
        (writes_nothing, "not bitwise equal", torch.float32),
        (writes_what_lies_between, "every second column: wrote around", torch.float32),
        (hides_the_change, "_version went up by 0, expected 1", torch.bfloat16),
        (wrong_gradient, "gradient of argument 0", torch.float32),
        (no_second_gradient, "on_clone: Jacobian mismatch", torch.float64),
        (writes_to_leaves, "a leaf: 'no error", torch.float32),
        (writes_where_elements_overlap, "an expanded tensor: 'no error", torch.float32),
        (forgets_the_base, "a view", torch.float32),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_op_is_found(op: Op, words: str, dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match=re.compile(words, re.DOTALL)):
        run(op, dtype)


def test_both_entries_are_tried() -> None:
    spec = dataclasses.replace(RELU, inplace_overload=torch.ops.aten.sigmoid_.default)
    with pytest.raises(AssertionError, match=r"torch\.ops.*not bitwise equal"):
        testing.Case(spec, CHECKS["in_place"], CPU, torch.float32).run()


def test_specs_without_it_have_no_case() -> None:
    for spec, expected in ((ADD, False), (RELU, True)):
        names = {case.check.name for case in testing.cases([spec], CPU)}
        assert ("in_place" in names) == expected
