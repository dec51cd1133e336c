"""add beyond the contract: promotion, layout and special values as in torch.add."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from dtypes import FLOATING, name

import torchkiln
from torchkiln.testing.compare import bits

OTHER = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
PAIRS = [
    (left, right)
    for left, right in product(FLOATING + OTHER, repeat=2)
    if left in FLOATING or right in FLOATING
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{name(p[0])}-{name(p[1])}")
def test_promotion(device: torch.device, pair: tuple[torch.dtype, torch.dtype]) -> None:
    """Every pair of dtypes promotes as in torch, with 0-dimensional operands or not."""
    for left, right in product([(), (3,)], repeat=2):
        # Small integers: every dtype represents the values and the sum exactly.
        a = (
            torch.tensor([1, 0, 1], device=device)
            .to(pair[0])[: 3 if left else 1]
            .reshape(left or ())
        )
        b = (
            torch.tensor([1, 1, 0], device=device)
            .to(pair[1])[: 3 if right else 1]
            .reshape(right or ())
        )
        if not torch.result_type(a, b).is_floating_point:
            # The pairs leave out the one case that promotes to the default dtype.
            raise AssertionError(f"{pair} does not promote to a float")
        expected = torch.add(a, b)
        found = torchkiln.add(a, b)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_default_dtype_decides_for_integers_beside_a_float_scalar(device: torch.device) -> None:
    a = torch.arange(3, device=device)
    b = torch.tensor(0.5, device=device)
    assert torchkiln.add(a, b).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert torchkiln.add(a, b).dtype == torch.add(a, b).dtype
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", FLOATING, ids=name)
def test_special_values(device: torch.device, dtype: torch.dtype) -> None:
    """Every pair of NaN, infinities, zeros, largest and smallest numbers adds as in torch."""
    info = torch.finfo(dtype)
    numbers = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0]
    numbers += [info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 2]
    column = torch.tensor(numbers, dtype=dtype, device=device)
    # Repeated often enough to use vectors, contiguous and broadcast.
    a = column.repeat_interleave(len(numbers)).repeat(5)
    b = column.repeat(5 * len(numbers))
    for found, expected in (
        (torchkiln.add(a, b), torch.add(a, b)),
        (torchkiln.add(column[:, None], column), torch.add(column[:, None], column)),
    ):
        assert torch.equal(found.isnan(), expected.isnan())
        there = ~expected.isnan()
        assert torch.equal(bits(found[there]), bits(expected[there]))


@pytest.mark.parametrize("dtype", FLOATING, ids=name)
def test_bitwise_as_torch(device: torch.device, dtype: torch.dtype) -> None:
    """Results equal torch's bit by bit, as a sum that is correctly rounded has one value."""
    a = torch.randn(1031, device=device).to(dtype)
    b = torch.randn(1031, device=device).to(dtype) * 8
    assert torch.equal(torchkiln.add(a, b), torch.add(a, b))


def test_layout_of_the_result(device: torch.device) -> None:
    """The result has the layout of the first dense operand of its shape, else it is row-major."""
    plain = torch.randn(2, 3, 5, 7, device=device)
    last = plain.to(memory_format=torch.channels_last)
    gap = torch.randn(2, 3, 5, 14, device=device)[..., ::2]
    column = torch.randn(3, 1, 1, device=device)
    row_major, channels_last = plain.stride(), last.stride()
    for a, b, strides in (
        (plain, last, row_major),
        (last, plain, channels_last),
        (last, column, channels_last),
        (column, last, channels_last),
        (gap, last, channels_last),
        (gap, gap, row_major),
        (plain[:, :1], plain[:1], row_major),
        (plain.expand(2, 3, 5, 7), column, row_major),
    ):
        found = torchkiln.add(a, b)
        assert found.stride() == strides
        torch.testing.assert_close(found, a + b)
    transposed = torch.randn(17, 13, device=device).t()
    assert torchkiln.add(transposed, transposed[:1]).stride() == (1, 13)


def test_zero_dim_on_the_cpu_takes_the_other_device(device: torch.device) -> None:
    a = torch.arange(5.0, device=device, requires_grad=True)
    b = torch.tensor(2.0, requires_grad=True)
    for found in (torchkiln.add(a, b), torchkiln.add(b, a)):
        assert found.device == a.device
        assert found.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
        grad_a, grad_b = torch.autograd.grad(found.sum(), (a, b))
        assert grad_a.device == a.device
        assert grad_b.device == b.device
        assert grad_b.item() == 5.0


def test_gradients_keep_dtype_and_shape(device: torch.device) -> None:
    a = torch.ones(4, 3, device=device, dtype=torch.bfloat16, requires_grad=True)
    b = torch.ones(3, device=device, dtype=torch.float64, requires_grad=True)
    torchkiln.add(a, b).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.dtype == torch.bfloat16
    assert b.grad.dtype == torch.float64
    assert b.grad.tolist() == [4.0, 4.0, 4.0]


def test_the_same_tensor_twice(device: torch.device) -> None:
    a = torch.randn(7, 11, device=device, requires_grad=True)
    found = torchkiln.add(a, a)
    assert torch.equal(found, 2 * a)
    found.sum().backward()
    assert a.grad is not None
    assert (a.grad == 2).all()


def test_inputs_may_overlap(device: torch.device) -> None:
    """Inputs may share memory, which the result does not."""
    base = torch.arange(12.0, device=device)
    found = torchkiln.add(base[:-1], base[1:])
    assert found.tolist() == [2.0 * i + 1 for i in range(11)]
    assert base.tolist() == list(range(12))


@pytest.mark.parametrize(
    "call", [torchkiln.add, torch.ops.torchkiln.add.default], ids=["python", "ops"]
)
def test_keywords(call: object) -> None:
    assert callable(call)
    assert call(b=torch.ones(2), a=torch.zeros(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", FLOATING, ids=name)
@pytest.mark.parametrize("number", [2, -0.75, 1e-3, 70000.0, True], ids=str)
def test_numbers(device: torch.device, dtype: torch.dtype, number: float) -> None:
    """A number is not rounded to the tensor's dtype, and promotes as in torch."""
    a = torch.randn(7, 9, device=device).to(dtype)
    assert torch.equal(torchkiln.add(a, number), torch.add(a, number))
    assert torch.equal(torchkiln.add(number, a), torch.add(a, number))
    leaf = a.clone().requires_grad_()
    torchkiln.add(leaf, number).sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad == 1).all()


def test_numbers_of_numpy(device: torch.device) -> None:
    """NumPy's scalars are numbers, and its arrays are refused, as in torch."""
    x = torch.arange(3.0, device=device)
    for number in (np.float32(0.5), np.float64(0.5), np.float16(0.5), np.int64(2), np.uint8(2)):
        found = torchkiln.add(x, number)  # type: ignore[arg-type]
        assert torch.equal(found, torch.add(x, float(number)))
        assert torch.equal(torchkiln.muladd(x, number, 1.0), x * float(number) + 1)  # type: ignore[arg-type]
    assert torchkiln.add(x.long(), np.float32(0.5)).dtype == torch.float32  # type: ignore[arg-type]
    for array in (np.ones(3), np.array(2.0), [1.0], "x", 2j):
        words = rf"add: b: got [\w.]*{type(array).__name__}, expected a torch.Tensor or a number"
        with pytest.raises(TypeError, match=words):
            torchkiln.add(x, array)  # type: ignore[arg-type]


def test_numbers_beside_other_dtypes(device: torch.device) -> None:
    integers = torch.arange(3, device=device)
    assert torchkiln.add(integers, 0.5).tolist() == [0.5, 1.5, 2.5]
    assert torchkiln.add(integers, 0.5).dtype == torch.float32
    total = torchkiln.add(2.0, 3)
    assert total.item() == 5.0
    assert total.dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"add: a, b: got dtypes int64 and int64, which promote"):
        torchkiln.add(integers, 2)


def test_numbers_under_transformations(device: torch.device) -> None:
    a = torch.randn(4, 5, device=device)
    assert torch.equal(torch.vmap(lambda row: torchkiln.add(row, 2.5))(a), a + 2.5)
    assert torch.equal(
        torch.func.grad(lambda x: torchkiln.add(2.5, x).sum())(a), torch.ones_like(a)
    )
    tangent = torch.func.jvp(lambda x: torchkiln.add(x, 2.5), (a,), (a,))[1]
    assert torch.equal(tangent, a)
    assert torchkiln.add(a.to("meta"), 2.5).shape == a.shape


@pytest.mark.parametrize("dtype", FLOATING, ids=name)
@pytest.mark.parametrize("alpha", [2, -0.3, 0, 1.0], ids=str)
def test_alpha(device: torch.device, dtype: torch.dtype, alpha: float) -> None:
    """``a + alpha * b`` is rounded once."""
    a, b = (torch.randn(5, 9, device=device).to(dtype).requires_grad_() for _ in range(2))
    found = torchkiln.add(a, b, alpha=alpha)
    assert found.dtype == dtype
    exact = a.double() + alpha * b.double()
    rtol = torch.finfo(dtype).eps / (1 if dtype == torch.float64 else 2) * 1.001
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=1e-7)
    grads = torch.autograd.grad(found.sum(), (a, b))
    expected = torch.autograd.grad(torch.add(a, b, alpha=alpha).sum(), (a, b))
    torch.testing.assert_close(grads, expected)
    assert torchkiln.add(a[0], b, alpha=alpha).shape == b.shape
    assert torchkiln.add(a, 2.0, alpha=alpha).dtype == dtype


@pytest.mark.parametrize("other", [torch.int32, torch.bool, torch.float64], ids=name)
@pytest.mark.parametrize("shapes", [((3,), (3,)), ((3,), ()), ((), (3,)), ((), ())], ids=str)
def test_alpha_takes_no_part_in_the_promotion(
    device: torch.device, shapes: tuple[tuple[int, ...], ...], other: torch.dtype
) -> None:
    a = torch.ones(shapes[0], device=device, dtype=torch.float16)
    b = torch.ones(shapes[1], device=device).to(other)
    found = torchkiln.add(a, b, alpha=2)
    assert found.dtype == torch.result_type(a, b)
    assert (found == 3).all()


def test_alpha_that_is_no_number(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    for alpha in (torch.tensor(2.0), "2", 2j):
        with pytest.raises(
            TypeError, match=r"add: alpha: got \w+, expected a number; for a tensor"
        ):
            torchkiln.add(x, x, alpha=alpha)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"add: a, b: got dtypes int64 and int64"):
        torchkiln.add(x.long(), x.long(), alpha=0.5)


@pytest.mark.parametrize("dtype", FLOATING, ids=name)
@pytest.mark.parametrize("value", [1, 0.5, -3], ids=str)
def test_addcmul(device: torch.device, dtype: torch.dtype, value: float) -> None:
    x, y = (torch.randn(5, 9, device=device).to(dtype).requires_grad_() for _ in range(2))
    row = torch.randn(9, device=device).to(dtype).requires_grad_()
    found = torchkiln.addcmul(x, y, row, value=value)
    exact = x.double() + value * y.double() * row.double()
    size = x.double().abs() + (value * y.double() * row.double()).abs()
    assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps * size).all()
    assert found.dtype == dtype
    grads = torch.autograd.grad(found.sum(), (x, y, row))
    expected = torch.autograd.grad(torch.addcmul(x, y, row, value=value).sum(), (x, y, row))
    for grad, due in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, due, rtol=4 * torch.finfo(dtype).eps, atol=1e-2)
    with pytest.raises(RuntimeError, match=r"addcmul: input, tensor1, tensor2: got dtypes int64"):
        torchkiln.addcmul(*(t.long() for t in (x, y, row)), value=2)
