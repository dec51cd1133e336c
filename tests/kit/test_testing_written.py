"""The check of functions that write into tensors of the caller detects faulty functions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import torchkiln
from torchkiln import testing
from torchkiln.testing.contract import CHECKS
from torchkiln.testing.data import normal
from torchkiln.testing.forms import Written, form_of
from torchkiln.testing.specs.gated import SWIGLU
from torchkiln.testing.specs.pointwise import ADD

CPU = torch.device("cpu")
SHAPES = {"typical": (6, 10), "one": (1,), "0-dim": (), "empty": (0, 3), "odd": (7, 13)}

Op = Callable[..., Tensor]
CHANGES: dict[str, Any] = {"differentiable": (0,), "refusals": None, "invalid": None}
relu_: Op = torch.relu_
swiglu: Op = torchkiln.swiglu


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[testing.Sample]:
    for name, shape in SHAPES.items():
        x = normal("x", shape, device, dtype)
        yield testing.Sample(name, (x + x.sign() / 4,))


RELU = dataclasses.replace(
    ADD,
    name="relu",
    op=torch.relu,
    overload=torch.ops.aten.relu.default,
    reference=torch.relu,
    composite=torch.relu,
    magnitude=torch.abs,
    inputs=inputs,
    differentiable=(0,),
)


def form(op: Op, overload: Any = torch.ops.aten.relu_.default) -> testing.OpSpec:
    """The in-place form of relu by this op; its overload names the argument ``self``."""

    def named(self: Tensor) -> Tensor:
        return op(self)

    return form_of(RELU, Written(named, overload, {"self": None}, torch.relu, ()), **CHANGES)


def run(op: Op, dtype: torch.dtype = torch.float32) -> None:
    testing.Case(form(op), CHECKS["written"], CPU, dtype).run()


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
    """Correct for factor 1 and first derivatives; a second derivative raises an error."""

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
    spec = form(relu_, torch.ops.aten.sigmoid_.default)
    with pytest.raises(AssertionError, match=r"torch\.ops.*not bitwise equal"):
        testing.Case(spec, CHECKS["written"], CPU, torch.float32).run()


def test_specs_without_it_have_no_case() -> None:
    found = {case.spec.name for case in testing.cases([ADD, SWIGLU], CPU) if is_written(case)}
    assert found == {"_swiglu_out"}


def is_written(case: testing.Case) -> bool:
    return case.check.name == "written"


def writes_behind(out: Tensor) -> None:
    """Writes the element after ``out``, if ``out`` is a part of a larger buffer."""
    if out.storage_offset():
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()


def records_nothing(gate: Tensor, up: Tensor | None = None, *, out: Tensor) -> Tensor:
    with torch.no_grad():
        return swiglu(gate, up, out=out)


def writes_too_much(gate: Tensor, up: Tensor | None = None, *, out: Tensor) -> Tensor:
    swiglu(gate, up, out=out)
    writes_behind(out)
    return out


def returns_another(gate: Tensor, up: Tensor | None = None, *, out: Tensor) -> Tensor:
    return swiglu(gate, up, out=out).clone()


def adds_to_it(gate: Tensor, up: Tensor | None = None, *, out: Tensor) -> Tensor:
    before = out.clone()
    return swiglu(gate, up, out=out).add_(before.nan_to_num(0) * 0 + 1)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (records_nothing, "gate requires a gradient: no error"),
        (writes_too_much, "out contiguous: wrote around"),
        (returns_another, "returned another tensor"),
        (adds_to_it, "beside the op: not bitwise equal"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_out_is_found(op: Op, words: str) -> None:
    spec = next(form for form in SWIGLU.forms if form.written is not None)
    assert spec.written is not None
    broken = dataclasses.replace(spec, written=dataclasses.replace(spec.written, function=op))
    with pytest.raises(AssertionError, match=words):
        testing.Case(broken, CHECKS["written"], CPU, torch.float32).run()
