"""Aliases for two uses of a batch norm's result: the norm's backward adds both gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln.ops._two_uses import two_uses

bn_act: Any = torchkiln.bn_act


class Case:
    """The result of a batch norm with a residual, and an incoming gradient for each of its uses."""

    def __init__(self, device: torch.device, dtype: torch.dtype, layout: Any = None) -> None:
        shape = (4, 16, 6, 6)
        made = [torch.randn(shape, device=device).to(dtype) for _ in range(4)]
        made = [t.to(memory_format=layout or torch.channels_last) for t in made]
        owned = torch.promote_types(dtype, torch.float32)
        vectors = [torch.randn(16, device=device, dtype=owned) for _ in range(2)]
        self.leaves = [t.requires_grad_() for t in (made[0], *vectors, made[1])]
        self.grads = made[2:]
        self.y: Tensor = bn_act(*self.leaves[:3], None, None, self.leaves[3], training=True)

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        """A loss for which the gradients of the uses are ``grads``."""
        return (a * self.grads[0]).sum() + (b * self.grads[1]).sum()

    def backward(self, *uses: Tensor, **options: Any) -> list[Tensor]:
        """Runs backward; returns the gradients of the leaves."""
        for leaf in self.leaves:
            leaf.grad = None
        self.loss(*uses).backward(**options)
        return [leaf.grad.clone() for leaf in self.leaves if leaf.grad is not None]

    def passed(self, a: Tensor) -> list[Tensor]:
        """The list to which the next backward adds the gradient that the aliases' node returns."""
        seen: list[Tensor] = []
        assert a.grad_fn is not None
        a.grad_fn.register_hook(lambda passed, _: seen.append(passed[0]))
        return seen


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_gradients_are_those_of_autograd_to_the_bit(
    device: torch.device, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    case = Case(device, dtype, layout)
    expected = case.backward(case.y, case.y, retain_graph=True)
    a, b = two_uses(case.y)
    assert torch.equal(a, case.y)
    assert a.data_ptr() == b.data_ptr() == case.y.data_ptr()
    seen = case.passed(a)
    found = case.backward(a, b, retain_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert torch.equal(seen[0], case.grads[0])  # passed outside of the graph: the other gradient
    again = case.backward(a, b)
    assert all(torch.equal(x, y) for x, y in zip(again, expected, strict=True))


def watched_by_a_hook(case: Case, seen: list[Tensor]) -> None:
    case.y.register_hook(seen.append)


def watched_by_the_node(case: Case, seen: list[Tensor]) -> None:
    assert case.y.grad_fn is not None
    case.y.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))


def watched_behind_the_node(case: Case, seen: list[Tensor]) -> None:
    assert case.y.grad_fn is not None
    case.y.grad_fn.register_hook(lambda _, grads: seen.append(grads[0]))


@pytest.mark.parametrize("watch", [watched_by_a_hook, watched_by_the_node, watched_behind_the_node])
@pytest.mark.parametrize("before", [False, True])
def test_who_sees_the_gradient_sees_the_sum(
    device: torch.device, watch: Callable[[Case, list[Tensor]], None], *, before: bool
) -> None:
    case = Case(device, torch.float64)
    seen: list[Tensor] = []
    if before:
        watch(case, seen)
    uses = two_uses(case.y)
    if not before:
        watch(case, seen)
    case.backward(*uses)
    torch.testing.assert_close(seen, [case.grads[0] + case.grads[1]], rtol=0, atol=0)


def test_retained_and_asked_for_gradients(device: torch.device) -> None:
    case = Case(device, torch.float64)
    total = case.grads[0] + case.grads[1]
    expected = case.backward(case.y, case.y, retain_graph=True)
    uses = two_uses(case.y)
    found = torch.autograd.grad(case.loss(*uses), [case.y, *case.leaves], retain_graph=True)
    torch.testing.assert_close(list(found), [total, *expected], rtol=0, atol=0)
    found = torch.autograd.grad(
        case.loss(*uses), [case.y, *case.leaves], create_graph=True, materialize_grads=True
    )
    torch.testing.assert_close(list(found), [total, *expected])
    case.leaves[0].grad = None
    case.loss(*uses).backward(inputs=[case.leaves[0]], retain_graph=True)
    only: Any = case.leaves[0].grad
    torch.testing.assert_close(only, expected[0], rtol=0, atol=0)
    case.y.retain_grad()
    case.backward(*uses)
    kept: Any = case.y.grad
    torch.testing.assert_close(kept, total, rtol=0, atol=0)


def test_a_third_use_and_a_single_one(device: torch.device) -> None:
    case = Case(device, torch.float64)
    a, b = two_uses(case.y)
    leaves = case.leaves
    found = torch.autograd.grad(case.loss(a, b) + case.y.sin().sum(), leaves, retain_graph=True)
    case.loss(a, b).add(case.y.sin().sum()).backward(retain_graph=True)
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(found))
    for use in (a, b):
        for leaf in leaves:
            leaf.grad = None
        use.sin().sum().backward(retain_graph=True)
        expected = torch.autograd.grad(case.y.sin().sum(), leaves, retain_graph=True)
        torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected))


def test_two_pairs_of_uses(device: torch.device) -> None:
    case = Case(device, torch.float64)
    (a, b), (c, d) = two_uses(case.y), two_uses(case.y)
    loss = case.loss(a, b) + (c.sin() + 3 * d.cos()).sum()
    expected = torch.autograd.grad(loss, case.leaves, retain_graph=True)
    loss.backward()
    found: list[Any] = [leaf.grad for leaf in case.leaves]
    torch.testing.assert_close(found, list(expected))


class Nested(torch.autograd.Function):
    """The identity; its backward runs another backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, other: Callable[[], object]) -> Tensor:
        ctx.other = other
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.other()
        return grad, None


@pytest.mark.parametrize("whole", [False, True])
def test_a_backward_inside_another(device: torch.device, *, whole: bool) -> None:
    case = Case(device, torch.float64)
    copies = [leaf.detach().clone().requires_grad_() for leaf in case.leaves]

    def other() -> None:
        loss = case.loss(*two_uses(case.y))
        if whole:
            loss.backward(retain_graph=True)
        else:
            torch.autograd.grad(loss, case.leaves, retain_graph=True)

    # This node runs between the nodes of the aliases and of y.
    apply: Any = Nested.apply
    nested = apply(case.y, other)
    loss = case.loss(*two_uses(case.y)) + nested.sin().sum()
    loss.backward()
    y = bn_act(*copies[:3], None, None, copies[3], training=True)
    (case.loss(y, y) * (1 + whole) + y.sin().sum()).backward()
    found: list[Any] = [leaf.grad for leaf in case.leaves]
    expected: list[Any] = [leaf.grad for leaf in copies]
    torch.testing.assert_close(found, expected)


def test_batched_gradients(device: torch.device) -> None:
    case = Case(device, torch.float64)
    both = torch.stack([torch.ones(()), 2 * torch.ones(())]).to(case.y)
    found = torch.autograd.grad(
        case.loss(*two_uses(case.y)), case.leaves, both, retain_graph=True, is_grads_batched=True
    )
    expected = case.backward(case.y, case.y)
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, torch.stack([right, 2 * right]))


def test_other_values_stay_themselves(device: torch.device) -> None:
    case = Case(device, torch.float32)
    leaf = case.leaves[0]
    plain = bn_act(*case.leaves[:3], training=True)  # without a residual
    with torch.no_grad():
        constant = bn_act(*case.leaves[:3], None, None, case.leaves[3], training=True)
    for x in (leaf, leaf * 2, plain, constant, case.y.detach(), case.y[:2]):
        assert all(use is x for use in two_uses(x))


@pytest.mark.cuda
def test_branches_on_two_streams() -> None:
    case = Case(torch.device("cuda"), torch.bfloat16)
    expected = case.backward(case.y, case.y, retain_graph=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a, b = two_uses(case.y)
        loss = case.loss(a, b)
    torch.cuda.current_stream().wait_stream(side)
    for leaf in case.leaves:
        leaf.grad = None
    loss.backward()
    torch.cuda.synchronize()
    found = [leaf.grad for leaf in case.leaves if leaf.grad is not None]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
