"""Activations beyond the contract: special values, tails, layouts, modules, graphs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from dtypes import every_dtype
from torch import nn
from torch.nn import functional as F

import torchkiln
from torchkiln.testing import OpSpec, Sample
from torchkiln.testing.compare import Where, bits, require_values
from torchkiln.testing.specs import FAMILIES
from torchkiln.testing.specs.activation import FORMULAS

SPECS = FAMILIES["activation"]


def name(value: object) -> str:
    return value.name if isinstance(value, OpSpec) else str(value).removeprefix("torch.")


every_op = pytest.mark.parametrize("spec", SPECS, ids=name)


@every_dtype
@every_op
def test_special_values(device: torch.device, dtype: torch.dtype, spec: OpSpec) -> None:
    """NaN, infinities and zeros give torch's results, in vectors and in the tail."""
    numbers = [math.nan, math.inf, -math.inf, 0.0, -0.0]
    # Torch's float64 loop is the truth: its float32 gelu is NaN at infinity.
    expected = spec.composite(torch.tensor(numbers, dtype=torch.float64)).to(dtype)
    x = torch.tensor(numbers, dtype=dtype, device=device).repeat(7)
    found = spec.op(x).cpu().reshape(7, 5)
    for row in found:
        assert torch.equal(row.isnan(), expected.isnan())
        there = ~expected.isnan()
        assert torch.equal(row[there], expected[there])
        if spec.name != "relu":  # relu returns +0 at -0; torch's sign depends on the loop
            assert torch.equal(row[there].signbit(), expected[there].signbit())


@every_dtype
@every_op
def test_pieces_have_the_same_bits(device: torch.device, dtype: torch.dtype, spec: OpSpec) -> None:
    """Results and gradients of an element do not depend on the loop that computes it."""
    x = torch.randn(1003, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn_like(x)
    y = spec.op(x)
    whole = y, *torch.autograd.grad(y, x, grad)
    parts = [slice(i, i + 17) for i in range(0, 1003, 17)]
    each = [spec.op(x[part]) for part in parts]
    found = torch.cat(each), *torch.autograd.grad(each, x, [grad[part] for part in parts])
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one, other)


@every_dtype
@every_op
def test_large_and_small_arguments(device: torch.device, dtype: torch.dtype, spec: OpSpec) -> None:
    """Results agree with float64 for |x| of 3 to 110, and of 0.1 down to 1e-30."""
    large = torch.linspace(3, 110, 1031, dtype=torch.float64)
    small = torch.logspace(-30, -1, 1031, dtype=torch.float64)
    for values in (large, -large, small, -small):
        x = values.to(dtype).to(device)
        sample = Sample("tail", (x,))
        require_values(spec.op(x), sample, Where(spec, "tail", sample))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
@pytest.mark.parametrize("op", ["silu", "sigmoid", "tanh"])
@pytest.mark.parametrize("low", [-80.0, -13.0, -1e-3])
def test_digits_are_kept_where_the_result_is_small(
    device: torch.device, dtype: torch.dtype, op: str, low: float
) -> None:
    """The error is at most 6 eps of the result, also where the result is near 0."""
    x = torch.linspace(low, low / 2, 257, dtype=torch.float64).to(dtype).to(device)
    exact = FORMULAS[op].exact(x.double())
    error = (getattr(torchkiln, op)(x).double() - exact).abs()
    assert (error <= 6 * torch.finfo(dtype).eps * exact.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_quick_gelu_below_0(device: torch.device, dtype: torch.dtype) -> None:
    """The error is at most 6 eps of the result, and 1 eps more per unit of the exponent."""
    x = torch.linspace(-51, -1e-3, 4099, dtype=torch.float64).to(dtype).to(device)
    exact = FORMULAS["quick_gelu"].exact(x.double())
    error = (torchkiln.quick_gelu(x).double() - exact).abs()
    steps = 6 + 1.702 * x.double().abs()
    assert (error <= steps * torch.finfo(dtype).eps * exact.abs()).all()


@every_dtype
def test_gelu_from_5_to_13(device: torch.device, dtype: torch.dtype) -> None:
    """Gelu of -13 to -5 is as accurate as torch's, though 1 + erf has no correct digits left."""
    x = torch.linspace(-13, -5, 513, dtype=torch.float64).to(dtype).to(device)
    exact = FORMULAS["gelu"].exact(x.double())
    ours = (torchkiln.gelu(x).double() - exact).abs()
    theirs = (F.gelu(x.cpu()).double() - exact.cpu()).abs().to(device)
    assert (ours <= theirs + torch.finfo(torch.float32).eps * x.double().abs()).all()


def test_gelu_on_the_cpu_in_units_in_the_last_place() -> None:
    """At most 5 units, and 2 x^2 more below 0, where the exponent -0.5 x^2 is rounded."""
    x = torch.cat([torch.linspace(-13.2, 8, 2**20 + 7), torch.linspace(-0.1, 0.1, 2**18)])
    exact = FORMULAS["gelu"].exact(x.double())
    rounded = exact.float()
    unit = (torch.nextafter(rounded, torch.tensor(math.inf)) - rounded).double()
    error = (torchkiln.gelu(x).double() - exact).abs() / unit
    assert (error <= 5 + 2 * x.double().clamp(max=0).square()).all()
    tiny = torch.tensor([1e-45, 3e-41, 1e-38, 2e-35, 1e-30])
    for numbers in (tiny, -tiny):
        expected = (numbers.double() / 2).float()
        torch.testing.assert_close(torchkiln.gelu(numbers), expected, rtol=4e-7, atol=1.5e-45)


def test_gelu_of_float64_on_the_cpu_in_units_in_the_last_place() -> None:
    """At most 6 units, and 3 x^2 more below 0, as torch's erfc, the truth, rounds its argument."""
    x = torch.linspace(-37, 8, 2**18 + 7, dtype=torch.float64)
    exact = FORMULAS["gelu"].exact(x)
    unit = (torch.nextafter(exact, torch.tensor(math.inf, dtype=torch.float64)) - exact).abs()
    error = (torchkiln.gelu(x) - exact).abs() / unit
    assert (error <= 6 + 3 * x.clamp(max=0).square()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
@pytest.mark.parametrize("op", ["gelu", "gelu_tanh"])
def test_half_precision_on_the_cpu_is_the_rounded_float32_result(
    op: str, dtype: torch.dtype
) -> None:
    """All 65,536 numbers, and 1,019 of them with a partial vector, are float32 results, rounded."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for x in (every, every[:1019]):
        found, expected = getattr(torchkiln, op)(x), getattr(torchkiln, op)(x.float()).to(dtype)
        there = ~expected.isnan()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found[there].view(torch.int16), expected[there].view(torch.int16))


@every_op
def test_layout(device: torch.device, spec: OpSpec) -> None:
    """A dense tensor's result has its strides; others give a contiguous result, as in torch."""
    plain = torch.randn(2, 3, 5, 7, device=device)
    for x, kept in (
        (plain, True),
        (plain.to(memory_format=torch.channels_last), True),
        (plain.permute(3, 0, 2, 1), True),
        (plain[..., ::2], False),
        (plain[:, :1].expand(2, 3, 5, 7), False),
    ):
        found = spec.op(x)
        assert found.stride() == (x.stride() if kept else x.contiguous().stride())
        torch.testing.assert_close(found, spec.composite(x))


def test_gelu_chooses(device: torch.device) -> None:
    x = torch.randn(5, 7, device=device)
    assert torch.equal(torchkiln.gelu(x, "tanh"), torchkiln.gelu_tanh(x))
    assert torch.equal(torchkiln.gelu(x, approximate="none"), torchkiln.gelu(x))
    words = r"torchkiln\.gelu: approximate: got 'erf', expected 'none' or 'tanh'"
    with pytest.raises(RuntimeError, match=words):
        torchkiln.gelu(x, "erf")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"torchkiln\.nn\.GELU: approximate: got 'erf'"):
        torchkiln.nn.GELU("erf")  # type: ignore[arg-type]


TWINS: list[tuple[nn.Module, nn.Module]] = [
    (torchkiln.nn.ReLU(), nn.ReLU()),
    (torchkiln.nn.ReLU(inplace=True), nn.ReLU(inplace=True)),
    (torchkiln.nn.SiLU(), nn.SiLU()),
    (torchkiln.nn.SiLU(inplace=True), nn.SiLU(inplace=True)),
    (torchkiln.nn.GELU(), nn.GELU()),
    (torchkiln.nn.GELU("tanh"), nn.GELU("tanh")),
    (torchkiln.nn.GELU(approximate="none"), nn.GELU(approximate="none")),
    (torchkiln.nn.Sigmoid(), nn.Sigmoid()),
    (torchkiln.nn.Tanh(), nn.Tanh()),
]


@pytest.mark.parametrize("pair", TWINS, ids=lambda pair: repr(pair[0]))
def test_modules_are_torchs(device: torch.device, pair: tuple[nn.Module, nn.Module]) -> None:
    ours, theirs = pair
    assert repr(ours) == repr(theirs)
    assert ours.state_dict() == theirs.state_dict() == {}
    for training in (True, False):
        x = torch.randn(3, 5, 7, device=device)
        inputs = [x.clone().requires_grad_() for _ in pair]
        before = [leaf * 1 for leaf in inputs]
        results = [m.train(training)(t) for m, t in zip(pair, before, strict=True)]
        torch.testing.assert_close(*results)
        written = [t is result for t, result in zip(before, results, strict=True)]
        assert written[0] == written[1] == getattr(theirs, "inplace", False)
        for result in results:
            result.square().sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


@every_op
def test_a_graph_has_torchs_op(spec: OpSpec, traced: Callable[..., set[str]]) -> None:
    """A graph has one op of ATen per activation, or two, which Inductor fuses with others."""
    x = torch.randn(4, 6)
    ops = {"quick_gelu": 2, "relu2": 2}.get(spec.name, 1)
    functions = [spec.op, *(form.written.function for form in spec.forms if form.written)]
    for function in functions:
        found = traced(lambda t, f=function: f(t * 2), x)
        assert len(found) == 1 + ops  # 1 for the product with 2
        assert not any("torchkiln" in target for target in found), found


@pytest.mark.parametrize("spec", [s for s in SPECS if s.forms], ids=name)
def test_what_backward_needs_is_guarded(device: torch.device, spec: OpSpec) -> None:
    """Backward raises an error if the argument or the result that it reads was overwritten."""
    x = torch.randn(4, 6, device=device, requires_grad=True)
    y = x * 1
    out = spec.op(y)
    y.add_(1)
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_half_precision_is_rounded_once(device: torch.device) -> None:
    """Rounded once from float32; on a GPU within 0.54 units in the last place plus its error."""
    for spec in SPECS:
        for dtype in (torch.float16, torch.bfloat16):
            x = (4 * torch.randn(4099, device=device)).to(dtype)
            found = spec.op(x)
            if device.type == "cpu":
                assert torch.equal(bits(found), bits(spec.op(x.float()).to(dtype))), spec.name
                continue
            truth = spec.reference(x.double())
            size = truth.abs().to(dtype)
            unit = torch.nextafter(size, torch.full_like(size, math.inf)).double() - size.double()
            error = (found.double() - truth).abs()
            assert (error <= 0.54 * unit + 2**-22 * x.double().abs()).all(), spec.name
