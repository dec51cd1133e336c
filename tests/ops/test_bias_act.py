"""bias_act beyond the contract: special values, mixed dtypes, and the sum over rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from dtypes import HALF, every_dtype, name
from torch import Tensor

import torchkiln
from torchkiln.testing.compare import bits
from torchkiln.testing.contract.dispatch import Recorder
from torchkiln.testing.contract.repeat import threads
from torchkiln.testing.specs.activation import FORMULAS
from torchkiln.typing import Activation


def gradient(leaf: Tensor) -> Tensor:
    """The gradient of a leaf after backward()."""
    assert leaf.grad is not None
    return leaf.grad


@every_dtype
def test_special_values(device: torch.device, dtype: torch.dtype) -> None:
    """NaN propagates, infinities follow arithmetic, and no result is -0."""
    numbers = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0]
    column = torch.tensor(numbers, dtype=dtype, device=device)
    x = column.repeat(6)[:, None].expand(-1, len(numbers) * 6).contiguous()
    bias = column.repeat_interleave(6)
    for scale in (1.0, -1.0, 0.0, math.inf, math.nan):
        found = torchkiln.bias_act(x, bias, scale=scale)
        expected = torch.relu(x * scale + bias)
        assert torch.equal(found.isnan(), expected.isnan())
        there = ~expected.isnan()
        assert torch.equal(bits(found[there]), bits(expected[there].abs()))


@every_dtype
def test_gradient_at_special_values(device: torch.device, dtype: torch.dtype) -> None:
    """As with torch.relu, the gradient is 0 for outputs of 0, and passes for NaN and infinity."""
    x = torch.tensor([[0.0, -0.0, -1.0, 1.0, math.inf, -math.inf, math.nan]], dtype=dtype)
    x = x.repeat(3, 5).to(device)
    bias = torch.zeros(35, dtype=dtype, device=device)
    grads = []
    for function in (torchkiln.bias_act, lambda x, b: torch.relu(x + b)):
        leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
        function(*leaves).backward(torch.full_like(x, 2.0))
        grads.append([gradient(leaf) for leaf in leaves])
    for found, expected in zip(*grads, strict=True):
        assert torch.equal(found, expected)


def test_overflow_of_half_precision(device: torch.device) -> None:
    """x * scale may exceed float16's range if the result does not."""
    x = torch.full((4, 40), 60000.0, dtype=torch.float16, device=device)
    bias = torch.full((40,), -60000.0, dtype=torch.float16, device=device)
    assert (torchkiln.bias_act(x, bias, scale=2.0) == 60000.0).all()
    assert torchkiln.bias_act(x, -bias, scale=2.0).isinf().all()


@pytest.mark.parametrize("dtype", HALF, ids=name)
@pytest.mark.parametrize("bias_dtype", ["same", "float32"])
def test_half_precision_is_rounded_once(
    device: torch.device, dtype: torch.dtype, bias_dtype: str
) -> None:
    """The result is the float32 result, rounded once."""
    x = torch.randn(67, 129, device=device).to(dtype)
    bias = torch.randn(129, device=device).to(dtype if bias_dtype == "same" else torch.float32)
    found = torchkiln.bias_act(x, bias, scale=0.37)
    wide = torch.relu(x.double() * 0.37 + bias.double())
    exact = wide.to(dtype)
    step = torch.finfo(dtype).eps * wide
    # The float32 rounding before can change only results that are ties, by one step.
    different = found != exact
    assert (found.double() - wide).abs().le(0.501 * step + 1e-7).all()
    assert different.sum() <= found.numel() // 1000


@every_dtype
def test_bias_gradient_of_integers_is_exact(device: torch.device, dtype: torch.dtype) -> None:
    """The gradient of bias is exact if float32 represents the sums: any order of terms is."""
    rows, columns = 2053, 71
    grad = torch.randint(-3, 4, (rows, columns), device=device).to(dtype)
    x = torch.randint(0, 2, (rows, columns), device=device).to(dtype)
    bias = torch.zeros(columns, device=device, dtype=dtype, requires_grad=True)
    torchkiln.bias_act(x, bias).backward(grad)
    exact = (grad.double() * (x > 0)).sum(0)
    assert torch.equal(gradient(bias), exact.to(dtype))


@pytest.mark.parametrize("dtype", HALF, ids=name)
def test_float32_bias_gets_a_float32_gradient(device: torch.device, dtype: torch.dtype) -> None:
    """The gradient of a float32 bias is summed in float32: neither half dtype has 2053."""
    rows = 2053
    x = torch.ones(rows, 5, device=device, dtype=dtype, requires_grad=True)
    bias = torch.ones(5, device=device, requires_grad=True)
    torchkiln.bias_act(x, bias).sum().backward()
    assert gradient(x).dtype == dtype
    assert gradient(bias).dtype == torch.float32
    assert gradient(bias).tolist() == [float(rows)] * 5


@pytest.mark.parametrize(
    "shape",
    [(1_000_003, 1), (500_009, 3), (65_537, 16), (3, 100_003), (1, 1_000_003)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_long_sums(device: torch.device, shape: tuple[int, int]) -> None:
    """Sums of very many rows or columns are exact, since float32 represents each of them."""
    grad = torch.randint(-2, 3, shape, device=device).float()
    x = torch.randint(-1, 2, shape, device=device).float()
    bias = torch.zeros(shape[1:], device=device, requires_grad=True)
    leaf = x.requires_grad_()
    output = torchkiln.bias_act(leaf, bias, scale=0.5)
    output.backward(grad)
    mask = leaf.detach() > 0
    assert torch.equal(output.detach(), leaf.detach().clamp(min=0) * 0.5)
    assert torch.equal(gradient(leaf), grad * mask * 0.5)
    assert torch.equal(gradient(bias), (grad.double() * mask).sum(0).float())


@pytest.mark.parametrize("scale", [1.0, -1.5])
@pytest.mark.parametrize("act", ["none", "relu", "gelu"])
@pytest.mark.parametrize("dtype", HALF, ids=name)
def test_gradients_of_one_long_row(
    device: torch.device, dtype: torch.dtype, act: Activation, scale: float
) -> None:
    """Each gradient is rounded once, with the gradient of x or without it."""
    columns = (1 << 18) + 3
    x, grad = (torch.randn(1, columns, device=device, dtype=dtype) for _ in range(2))
    bias = torch.randn(columns, device=device, dtype=dtype)
    found = []
    for wants in (True, False):
        leaves = x.clone().requires_grad_(wants), bias.clone().requires_grad_()
        torchkiln.bias_act(*leaves, scale=scale, act=act).backward(grad)
        found.append(gradient(leaves[1]))
        if wants:
            found.append(gradient(leaves[0])[0])
    z = (x.double() * scale + bias.double()).requires_grad_()
    truth = torch.autograd.grad(FORMULAS[act].exact(z), z, grad.double())[0]
    for one, factor in zip(found, (1, scale, 1), strict=True):
        expected = (truth[0] * factor).to(dtype)
        torch.testing.assert_close(one, expected)
        if act != "gelu":  # exact but for one rounding
            assert torch.equal(one, expected)


def test_accuracy_of_a_long_sum(device: torch.device) -> None:
    """The sum of 1,000,003 positive terms is as accurate as torch's pairwise sum."""
    rows = 1_000_003
    grad = torch.rand(rows, 2, device=device)
    x = torch.ones(rows, 2, device=device)
    bias = torch.zeros(2, device=device, requires_grad=True)
    torchkiln.bias_act(x, bias).backward(grad)
    truth = grad.double().sum(0)
    error = (gradient(bias) - truth).abs().max()
    torch_error = (grad.sum(0) - truth).abs().max()
    assert error <= 2 * torch_error + 4 * torch.finfo(torch.float32).eps * truth.max()


@pytest.mark.parametrize("rows", [63, 2049])
def test_a_sum_of_equal_rows(rows: int) -> None:
    """The error is at most 5 eps though all roundings have the same sign."""
    grad = torch.full((rows, 17), 0.98912)
    bias = torch.zeros(17, requires_grad=True)
    torchkiln.bias_act(torch.ones(rows, 17), bias, act="none").backward(grad)
    error = gradient(bias).double() / grad.double().sum(0) - 1
    assert error.abs().max() <= 5 * torch.finfo(torch.float32).eps


@pytest.mark.large
@pytest.mark.cuda
def test_bias_gradient_of_more_than_2_to_the_31_elements() -> None:
    """Rows on both sides of element 2**31 count in the sum, which float32 represents."""
    device = torch.device("cuda", 0)
    rows, columns = 1 << 16, (1 << 15) + 8
    row = torch.arange(rows, device=device).remainder(509).neg().to(torch.bfloat16)
    x = row[:, None].expand(rows, columns).contiguous()
    bias = torch.arange(columns, device=device).remainder(241).float().requires_grad_()
    output = torchkiln.bias_act(x, bias, scale=0.5)
    output.backward(torch.tensor(0.5, device=device, dtype=x.dtype).expand(x.shape))
    # All columns of x are equal, so each sum depends only on the bias.
    passed = [(x[:, 0].float() * 0.5 + b > 0).sum() for b in range(241)]
    expected = torch.stack(passed)[bias.detach().long()] * 0.5
    assert torch.equal(gradient(bias), expected)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_backward_computes_what_is_wanted(device: torch.device, wanted: tuple[bool, bool]) -> None:
    """The kernel computes only the required gradients."""
    x = torch.randn(4, 6, device=device, requires_grad=wanted[0])
    bias = torch.randn(6, device=device, requires_grad=wanted[1])
    recorder = Recorder({"torchkiln::_bias_act_backward"})
    with recorder:
        torchkiln.bias_act(x, bias).sum().backward()
    [(_, args, _)] = recorder.calls
    assert tuple(args[-1]) == wanted


def test_what_is_kept_for_backward(device: torch.device) -> None:
    """Saves nothing without a gradient, one bit per element for relu, else the inputs."""
    x = torch.randn(8, 6, device=device)
    bias = torch.randn(6, device=device)
    assert torchkiln.bias_act(x, bias).grad_fn is None
    leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
    inputs = {leaf.data_ptr() for leaf in leaves}
    act: Any
    for act in FORMULAS:
        kept: list[Tensor] = []

        def pack(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            torchkiln.bias_act(*leaves, act=act)
        if act in ("none", "relu"):
            size = 0 if act == "none" else 6
            assert [(t.dtype, t.numel()) for t in kept] == [(torch.uint8, size)]
        else:
            assert {t.data_ptr() for t in kept} == inputs


@pytest.mark.parametrize("act", FORMULAS)
def test_inputs_changed_in_place_are_noticed(device: torch.device, act: Activation) -> None:
    """Writing to an input that backward reads raises an error."""
    x, bias = torch.randn(8, 6, device=device), torch.zeros(6, device=device)
    leaf = x.clone().requires_grad_()
    output = torchkiln.bias_act(leaf, bias, act=act)
    (expected,) = torch.autograd.grad(output.sum(), leaf)
    output = torchkiln.bias_act(leaf, bias, act=act)
    output.add_(1)  # backward does not read it
    with torch.no_grad():
        leaf.mul_(-1)
    if act in ("none", "relu"):
        assert torch.equal(torch.autograd.grad(output.sum(), leaf)[0], expected)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("act", FORMULAS)
def test_every_activation_is_the_op_of_its_name(device: torch.device, act: Activation) -> None:
    x = torch.randn(67, 129, device=device)
    bias = torch.randn(129, device=device)
    expected = x + bias if act == "none" else getattr(torchkiln, act)(x + bias)
    torch.testing.assert_close(torchkiln.bias_act(x, bias, act=act), expected)


@every_dtype
def test_gradients_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    """Gradients are equal bit by bit: the division of rows depends only on their number."""
    x = torch.randn(4099, 37).to(dtype).requires_grad_()
    bias = torch.randn(37).to(dtype).requires_grad_()
    grad = torch.randn(4099, 37).to(dtype)
    found = []
    for count in (1, 2, 3, 7):
        with threads(count):
            output = torchkiln.bias_act(x, bias, scale=0.9)
            found.append(torch.autograd.grad(output, (x, bias), grad))
    for other in found[1:]:
        assert torch.equal(bits(other[0]), bits(found[0][0]))
        assert torch.equal(bits(other[1]), bits(found[0][1]))


def test_autocast_under_compile(device: torch.device) -> None:
    """A graph traced under autocast has autocast's dtypes."""
    x = torch.randn(6, 10, device=device)
    bias = torch.randn(10, device=device)

    def function(x: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return torchkiln.bias_act(x, bias)

    torch.compiler.reset()
    found: Any = torch.compile(function, fullgraph=True, backend="aot_eager")(x, bias)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, function(x, bias))


def test_autocast_leaves_float64(device: torch.device) -> None:
    x = torch.randn(6, 10, device=device, dtype=torch.float64)
    bias = torch.randn(10, device=device, dtype=torch.float64)
    with torch.autocast(device.type, torch.bfloat16):
        assert torchkiln.bias_act(x, bias).dtype == torch.float64


@pytest.mark.parametrize(
    ("scale", "kind"), [(torch.ones(()), "Tensor"), ("2", "str"), (None, "NoneType")]
)
def test_scale_is_a_number(scale: object, kind: str) -> None:
    """A tensor is refused: it would lose its gradient, and reading it would wait for the GPU."""
    message = rf"torchkiln\.bias_act: scale: got {kind}, expected a number"
    with pytest.raises(TypeError, match=message):
        torchkiln.bias_act(torch.ones(2, 4), torch.ones(4), scale=scale)  # type: ignore[arg-type]


def test_other_numbers_are_scales() -> None:
    x, bias = torch.ones(2, 4), torch.zeros(4)
    scales: tuple[Any, ...] = (3, True, np.float32(0.5), -1.0)
    for scale in scales:
        expected = torch.relu(x * float(scale))
        assert torch.equal(torchkiln.bias_act(x, bias, scale=scale), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_penalty_of_relu_is_0(device: torch.device, dtype: torch.dtype) -> None:
    """The gradient of relu stays in the graph, and its own gradient is 0, as in torch."""
    for op in (torchkiln.bias_act,):
        x = torch.randn(4, 5, device=device).to(dtype).requires_grad_()
        bias = torch.randn(5, device=device).to(dtype).requires_grad_()
        (grad,) = torch.autograd.grad(op(x, bias).sum(), x, create_graph=True)
        assert grad.grad_fn is not None
        grad.square().sum().backward()
        for leaf in (x, bias):
            assert leaf.grad is not None
            assert not leaf.grad.any()


DENSE = (
    ((24, 16), (1, 0)),
    ((13, 7), (1, 0)),
    ((2, 5, 7, 16), (0, 2, 3, 1)),
    ((5, 2, 16), (1, 0, 2)),
)
"""Sizes in memory, and the dimension that each dimension of x is."""


@pytest.mark.parametrize("sizes", DENSE, ids=str)
@pytest.mark.parametrize("act", ["relu", "none", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_the_result_has_the_strides_of_a_dense_x(
    device: torch.device,
    sizes: tuple[tuple[int, ...], tuple[int, ...]],
    act: Activation,
    dtype: torch.dtype,
) -> None:
    """Strides are those of torch's elementwise ops; values are those of a contiguous x."""
    shape, order = sizes
    x = torch.randn(shape, device=device).to(dtype).permute(order)
    bias = torch.randn(x.shape[-1], device=device).to(dtype)
    incoming = torch.randn_like(x)
    assert incoming.stride() == x.stride()
    for scale in (1.0, -0.6):
        made = []
        for same in (x, x.contiguous()):
            leaf, shift = same.detach().requires_grad_(), bias.clone().requires_grad_()
            y = torchkiln.bias_act(leaf, shift, scale=scale, act=act)
            assert (
                y.stride()
                == same.stride()
                == torchkiln.bias_act(same, bias, scale=scale, act=act).stride()
            )
            made.append((y.detach(), *torch.autograd.grad(y, (leaf, shift), incoming)))
        for one, other in zip(*made, strict=True):
            torch.testing.assert_close(one, other)


def test_a_second_derivative_of_a_transposed_x(device: torch.device) -> None:
    x = torch.randn(6, 4, device=device, dtype=torch.float64).t().requires_grad_()
    bias = torch.randn(6, device=device, dtype=torch.float64, requires_grad=True)
    for act in ("relu", "silu"):
        function = lambda x, b, act=act: torchkiln.bias_act(x, b, scale=0.7, act=act)  # noqa: E731
        assert torch.autograd.gradcheck(function, (x, bias))
        assert torch.autograd.gradgradcheck(function, (x, bias))


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_one_gradient_of_a_transposed_x(device: torch.device, wanted: tuple[bool, bool]) -> None:
    x = torch.randn(24, 16, device=device).t().requires_grad_(wanted[0])
    bias = torch.randn(24, device=device).requires_grad_(wanted[1])
    torchkiln.bias_act(x, bias, scale=0.5).sum().backward()
    passed = (x * 0.5 + bias > 0).float()
    for leaf, expected in ((x, passed * 0.5), (bias, passed.sum(0))):
        if leaf.requires_grad:
            assert torch.equal(gradient(leaf), expected)


def test_the_graph_of_a_transposed_x() -> None:
    """The compiled result and gradients have the strides of eager ones."""
    compiled = torch.compile(torchkiln.bias_act, backend="aot_eager", fullgraph=True)
    x, bias = torch.randn(24, 16).t(), torch.randn(24)
    made = []
    for function in (torchkiln.bias_act, compiled):
        leaves = x.detach().requires_grad_(), bias.clone().requires_grad_()
        y = function(*leaves)
        made.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    for one, other in zip(*made, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("power", [1, 2, 3])
def test_derivatives_of_the_fourth_order(
    device: torch.device, power: int, which: tuple[int, ...]
) -> None:
    """Derivatives up to the fourth of powers of relu equal torch's; relu'' is 0."""
    leaves = [drawn.requires_grad_() for drawn in torch.randn(2, 4, 5, device=device).double()]
    x, bias = leaves[0], leaves[1][0]
    chains = []
    for y in (torchkiln.bias_act(x, bias, scale=1.3), torch.relu(x * 1.3 + bias)):
        total, chain = y.pow(power).sum(), []
        for _ in range(4):
            wanted = [leaves[i] for i in which]
            total = sum(
                (g.square().sum() for g in torch.autograd.grad(total, wanted, create_graph=True)),
                start=torch.zeros((), device=device),
            )
            chain.append(float(total.detach()))
        chains.append(chain)
    assert chains[0] == pytest.approx(chains[1], rel=1e-9)


@pytest.mark.parametrize("strides", [(5, 1), (9, 1), (1, 70003)])
@pytest.mark.parametrize("act", ["gelu", "relu", "none"])
def test_gradient_of_a_short_bias(act: Activation, strides: tuple[int, int]) -> None:
    """Rows of few columns are computed together, and their sums are added in float64."""
    shape = (70003, 5)
    x, grad = (torch.randn(70003 * 9).as_strided(shape, strides).detach() for _ in range(2))
    x, bias = x.requires_grad_(), torch.randn(5, requires_grad=True)
    y = torchkiln.bias_act(x, bias, scale=1.7, act=act)
    found = torch.autograd.grad(y, (x, bias), grad)
    z = (x.detach().double() * 1.7 + bias.detach().double()).requires_grad_()
    passed = torch.autograd.grad(FORMULAS[act].exact(z), z, grad.double())[0]
    torch.testing.assert_close(found[0], (passed * 1.7).float(), rtol=1e-5, atol=1e-5)
    error = (found[1] - passed.sum(0)).abs() / passed.abs().sum(0)
    assert float(error.max()) < 2.0**-22
