"""muladd beyond the contract: numbers, promotion, layout, one rounding."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from dtypes import FLOATING
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchkiln

OTHER = (torch.bool, torch.uint8, torch.int32, torch.int64)
NUMBERS = (2, -0.5, True, 0, math.pi)


def composed(a: Any, b: Any, c: Any) -> Tensor:
    result: Tensor = torch.as_tensor(a * b + c)
    return result


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize(
    "tensors",
    [which for which in product((False, True), repeat=3) if any(which)],
    ids=lambda which: "".join("t" if t else "n" for t in which),
)
def test_numbers_in_every_position(
    device: torch.device, dtype: torch.dtype, tensors: tuple[bool, ...]
) -> None:
    """A number is not rounded, and does not change the dtype of floating-point tensors."""
    for shape in ((5, 7), (1031,), ()):
        for numbers in product(NUMBERS, repeat=3):
            args: list[Any] = [
                torch.randn(shape, device=device).to(dtype) if is_tensor else number
                for is_tensor, number in zip(tensors, numbers, strict=True)
            ]
            found = torchkiln.muladd(*args)
            wide = [a.double() if isinstance(a, Tensor) else a for a in args]
            truth = composed(*wide).double().expand(shape)
            assert found.dtype == dtype
            assert found.shape == shape
            terms = composed(*(a.abs() if isinstance(a, Tensor) else abs(a) for a in wide)).double()
            inner = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
            allowed = torch.finfo(dtype).eps * truth.abs() + 2 * inner * terms + 1e-7
            assert ((found.double() - truth).abs() <= allowed).all(), numbers


def test_gradients_beside_numbers(device: torch.device) -> None:
    x = torch.randn(4, 5, device=device, requires_grad=True)
    calls: list[tuple[tuple[Any, ...], float]] = [
        ((x, 3, 1), 3.0),
        ((-2.0, x, 1), -2.0),
        ((2, 3, x), 1.0),
        ((x, 2, x), 3.0),
    ]
    for args, slope in calls:
        (grad,) = torch.autograd.grad(torchkiln.muladd(*args).sum(), x)
        assert (grad == slope).all()


@pytest.mark.parametrize("dtypes", list(product(FLOATING + OTHER, repeat=2)), ids=str)
def test_promotion(device: torch.device, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """``muladd`` promotes as ``x * y + z`` does in torch, also with 0-dimensional operands.

    ``addcmul`` promotes all three operands at once, as ``torch.addcmul`` does.
    """
    traced: Any = inspect.unwrap(torchkiln.muladd)  # the body that torch.compile traces
    for third in (torch.float16, torch.float32):
        for shapes in product([(), (3,)], repeat=3):
            # Small integers: every dtype represents the values and the result exactly.
            args = [
                torch.ones(shape, device=device).to(dtype)
                for shape, dtype in zip(shapes, (*dtypes, third), strict=True)
            ]
            if not any(t.is_floating_point() for t in args):
                continue
            together = torch.addcmul(args[2], args[0], args[1])
            fused = torchkiln.addcmul(args[2], args[0], args[1])
            assert fused.dtype == together.dtype, (dtypes, third, shapes)
            assert torch.equal(fused, together)
            expected = composed(*args)
            if not expected.is_floating_point():
                continue
            for function in (torchkiln.muladd, traced):
                found = function(*args)
                assert found.dtype == expected.dtype, (dtypes, third, shapes)
                assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [2.5, 3, True], ids=str)
def test_promotion_of_numbers_and_0_dim_tensors(
    device: torch.device, factor: float, dtype: torch.dtype
) -> None:
    traced: Any = inspect.unwrap(torchkiln.muladd)
    x, few = torch.ones(3, device=device), torch.ones((), device=device)
    calls: Any = product(
        (x.int(), few.int(), few.double()), (factor,), (x.to(dtype), few.to(dtype), 2)
    )
    for args in calls:
        expected = composed(*args)
        if expected.is_floating_point():
            assert torchkiln.muladd(*args).dtype == traced(*args).dtype == expected.dtype, args


@pytest.mark.parametrize("place", range(3))
def test_numbers_under_transforms(device: torch.device, place: int) -> None:
    x, y = (torch.randn(4, device=device) for _ in range(2))

    def call(function: Any, x: Tensor) -> Tensor:
        args: list[Any] = [x, y]
        args.insert(place, 0.5)
        return function(*args).square().sum()

    ours, torchs = (partial(call, function) for function in (torchkiln.muladd, composed))
    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacrev):
        torch.testing.assert_close(transform(ours)(x), transform(torchs)(x))
    found, expected = (torch.func.jvp(f, (x,), (y,)) for f in (ours, torchs))
    torch.testing.assert_close(found, expected)
    rows = torch.randn(3, 4, device=device)
    found, expected = (torch.func.vmap(torch.func.grad(f))(rows) for f in (ours, torchs))
    torch.testing.assert_close(found, expected)
    graph = make_fx(torch.func.grad(ours))(x)
    torch.testing.assert_close(graph(x), torch.func.grad(torchs)(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(device: torch.device, dtype: torch.dtype) -> None:
    """The product is not rounded before the sum, and may exceed the dtype's range."""
    a, b = (torch.randn(2053, device=device).to(dtype) for _ in range(2))
    found = torchkiln.muladd(a, b, -a * b)
    exact = a.double() * b.double() + (-a * b).double()
    assert torch.equal(found, exact.to(dtype))
    assert exact.abs().max() > 0  # a rounded product would give 0
    large = torch.full((40,), 300.0, device=device, dtype=torch.float16)
    assert (torchkiln.muladd(large, large, -60000.0) == 30000.0).all()


def test_layout_of_the_result(device: torch.device) -> None:
    """The result has the layout of the first dense operand of its shape, else it is row-major."""
    plain = torch.randn(2, 3, 5, 7, device=device)
    last = plain.to(memory_format=torch.channels_last)
    gap = torch.randn(2, 3, 5, 14, device=device)[..., ::2]
    column = torch.randn(3, 1, 1, device=device)
    for args, strides in (
        ((plain, last, last), plain.stride()),
        ((last, plain, plain), last.stride()),
        ((last, column, column), last.stride()),
        ((column, 2.0, last), last.stride()),
        ((gap, column, last), last.stride()),
        ((gap, gap, gap), plain.stride()),
    ):
        found = torchkiln.muladd(*args)
        assert found.stride() == strides
        torch.testing.assert_close(found, composed(*args))


def test_one_tensor_three_times(device: torch.device) -> None:
    x = torch.randn(7, 11, device=device, dtype=torch.float64, requires_grad=True)
    found = torchkiln.muladd(x, x, x)
    torch.testing.assert_close(found, x * x + x)
    (grad,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(grad, 2 * x + 1)


def test_zero_dim_on_the_cpu_takes_the_other_device(device: torch.device) -> None:
    x = torch.arange(5.0, device=device, requires_grad=True)
    factor = torch.tensor(2.0, requires_grad=True)
    shift = torch.tensor(-1.0, requires_grad=True)
    for found in (torchkiln.muladd(x, factor, shift), torchkiln.muladd(factor, x, shift)):
        assert found.device == x.device
        assert found.tolist() == [-1.0, 1.0, 3.0, 5.0, 7.0]
        grads = torch.autograd.grad(found.sum(), (x, factor, shift))
        assert [g.device for g in grads] == [x.device, factor.device, shift.device]
        assert [g.sum().item() for g in grads] == [10.0, 10.0, 5.0]


def test_only_numbers() -> None:
    """Integers alone are refused; a float among them gives the default dtype, as in torch.add."""
    assert torchkiln.muladd(2.0, 3, 1).item() == 7.0
    assert torchkiln.muladd(2.0, 3, 1).dtype == torch.float32
    with pytest.raises(RuntimeError, match="which promote to int64"):
        torchkiln.muladd(2, 3, 1)


@pytest.mark.parametrize("value", [2**70, -(2**70)])
def test_a_number_that_int64_does_not_hold(value: int) -> None:
    with pytest.raises(OverflowError):
        torchkiln.muladd(torch.ones(2), value, 1)


def test_subclasses_beside_numbers() -> None:
    class Tagged(Tensor):
        pass

    x = torch.ones(2).as_subclass(Tagged)
    found = torchkiln.muladd(x, 2, 1)
    assert type(found) is Tagged
    assert found.tolist() == [3.0, 3.0]


TRIPLES: list[tuple[Any, ...]] = [
    (torch.ones(2, dtype=torch.int32), torch.tensor(2.0, dtype=torch.float64), torch.ones(2)),
    (torch.ones(2, dtype=torch.int64), 0.1, torch.tensor(1.0, dtype=torch.float16)),
    (torch.ones(2, dtype=torch.bool), 0.5, torch.ones(2, dtype=torch.bfloat16)),
    (torch.tensor(257.0), torch.full((2,), 3.0, dtype=torch.bfloat16), torch.full((2,), -770.0)),
    (torch.tensor([70000]), 0.5, torch.tensor([-30000.0], dtype=torch.float16)),
    (torch.tensor([65504.0], dtype=torch.float16), 4, -3.0e5),
    (3, 0.1, torch.ones(2, dtype=torch.float64)),
]


@pytest.mark.parametrize(
    "args", TRIPLES, ids=lambda args: str([getattr(a, "dtype", a) for a in args])
)
def test_compiled_calls_promote_as_eager_ones(args: tuple[Any, ...]) -> None:
    """Compiled calls promote all operands to the compute dtype and round once, as eager ones."""
    found = torchkiln.muladd(*args)
    wide = [a.double() if isinstance(a, Tensor) else a for a in args]
    truth = composed(*wide).expand(found.shape)
    torch.testing.assert_close(found.double(), truth.to(found.dtype).double(), rtol=1e-6, atol=0)
    torch.compiler.reset()
    graph: Any = torch.compile(torchkiln.muladd, fullgraph=True, backend="aot_eager")
    compiled = graph(*args)
    assert compiled.dtype == found.dtype
    torch.testing.assert_close(compiled, found)


class Wrapper(Tensor):
    """A subclass that holds a tensor and handles ops in ``__torch_dispatch__``."""

    elem: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, elem: Tensor) -> Wrapper:  # noqa: PYI034
        wrapper: Any = Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype)
        wrapper.elem = elem
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map_only(Wrapper, lambda t: t.elem, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, op(*plain[0], **plain[1]))


class Seeing(TorchDispatchMode):
    """A dispatch mode that calls each op unchanged."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("numbers", [(2, 0.5), (0.1, True)], ids=str)
def test_numbers_in_modes_and_subclasses(numbers: tuple[float, float]) -> None:
    """Numbers work on meta and fake tensors, in modes, subclasses and selective checkpoints."""
    factor, shift = numbers
    x = torch.arange(4.0, requires_grad=True)
    expected = torchkiln.muladd(x, factor, shift)
    meta = torchkiln.muladd(x.to("meta"), factor, shift)
    assert (meta.shape, meta.dtype, meta.is_meta) == (x.shape, x.dtype, True)
    with FakeTensorMode() as mode:
        for fake in (torchkiln.muladd(mode.from_tensor(x), factor, shift), mode.from_tensor(x)):
            assert (fake.shape, fake.dtype) == (x.shape, x.dtype)
    with Seeing():  # type: ignore[no-untyped-call]
        assert torch.equal(torchkiln.muladd(x, factor, shift), expected)
    wrapped: Any = torchkiln.muladd(Wrapper(x.detach()), factor, shift)
    assert type(wrapped) is Wrapper
    assert torch.equal(wrapped.elem, expected)

    def save(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, save)
    again = checkpoint(torchkiln.muladd, x, factor, shift, use_reentrant=False, context_fn=contexts)
    assert torch.equal(again, expected)
    (grad,) = torch.autograd.grad(again.sum(), x)
    torch.testing.assert_close(grad, torch.full_like(grad, factor))


def test_a_graph_has_torchs_ops(traced: Callable[..., set[str]]) -> None:
    x = torch.randn(4, 6)
    for args in ((x, x, x), (x, 2.0, x), (2, x, 0.5)):
        found = traced(torchkiln.muladd, *args)
        assert not any("torchkiln" in target for target in found), found
