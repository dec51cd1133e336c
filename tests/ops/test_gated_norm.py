"""The gated RMS norm beyond the contract: models' formulas, groups, long rows, layouts, replace."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from torchkiln.testing.compare import bits

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]
GATE_FIRST = [False, True]
COMPOSED = "composed of swiglu and rms_norm: a row of {} elements is too long for one kernel"

every_device = pytest.mark.parametrize("device", DEVICES)
both_orders = pytest.mark.parametrize("gate_first", GATE_FIRST)


class MambaNorm(nn.Module):
    """The norm of Mamba2, Bamba and Zamba2: gates first, then normalizes groups of a given size."""

    def __init__(self, hidden_size: int, group_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps
        self.group_size = group_size

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        dtype, wide = hidden_states.dtype, wide_dtype(hidden_states)
        z = hidden_states.to(wide)
        if gate is not None:
            z = z * F.silu(gate.to(wide))
        rows = z.unflatten(-1, (-1, self.group_size))
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * rows.flatten(-2).to(dtype)


class QwenNorm(nn.Module):
    """The norm of Qwen3-Next: it gates after the weight."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        dtype, wide = hidden_states.dtype, wide_dtype(hidden_states)
        z = hidden_states.to(wide)
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        z = self.weight * z.to(dtype)
        return (z * F.silu(gate.to(wide))).to(dtype)


def wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


Tensors = tuple[Tensor, Tensor, Tensor]


def draw(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Tensors:
    """x, gate and weight, which require gradients."""

    def tensor(*sizes: int) -> Tensor:
        drawn = torch.randn(sizes, device=device, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    return tensor(*shape), tensor(*shape), tensor(shape[-1])


def truth(x: Tensor, gate: Tensor, weight: Tensor, gate_first: bool, groups: int = 1) -> Tensor:
    """The formula in float64, with eps = 1e-6."""
    x, gate, weight = (t.double() for t in (x, gate, weight))
    rows = (x * F.silu(gate) if gate_first else x).unflatten(-1, (groups, -1))
    y = (rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).flatten(-2) * weight
    return y if gate_first else y * F.silu(gate)


def op(x: Tensor, gate: Tensor, weight: Tensor, gate_first: bool, groups: int = 1) -> Tensor:
    return torchkiln.gated_rms_norm(
        x, gate, weight.shape, weight, 1e-6, gate_first=gate_first, groups=groups
    )


def require_equal_to_truth(tensors: Tensors, gate_first: bool, groups: int = 1) -> None:
    """Values and gradients are within a few roundings of the largest number of each tensor."""
    y, expected = op(*tensors, gate_first, groups), truth(*tensors, gate_first, groups)
    grad = torch.randn_like(y)
    found = (y, *torch.autograd.grad(y, tensors, grad))
    exact = (expected, *torch.autograd.grad(expected, tensors, grad.double()))
    for ours, theirs in zip(found, exact, strict=True):
        step = torch.finfo(ours.dtype).eps * (4 if ours.element_size() == 2 else 64)
        assert (ours - theirs).abs().max() <= step * theirs.abs().max()


@every_device
@pytest.mark.parametrize("group_size", [8, 24])
def test_the_formula_of_mamba(device: str, group_size: int) -> None:
    x, gate, weight = draw(3, 5, 24, device=device)
    module = MambaNorm(24, group_size).to(x)
    with torch.no_grad():
        module.weight.copy_(weight)
    expected = module(x, gate)
    found = op(x, gate, weight, gate_first=True, groups=24 // group_size)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@every_device
def test_the_formula_of_qwen(device: str) -> None:
    x, gate, weight = draw(3, 5, 24, device=device)
    module = QwenNorm(24).to(x)
    with torch.no_grad():
        module.weight.copy_(weight)
    found = op(x, gate, weight, gate_first=False)
    torch.testing.assert_close(found, module(x, gate), rtol=1e-13, atol=1e-13)


@every_device
@both_orders
@pytest.mark.parametrize("columns", [32, 42, 4096])
def test_groups_are_norms_of_their_columns(device: str, gate_first: bool, columns: int) -> None:
    x, gate, weight = draw(7, columns, device=device, dtype=torch.float32)
    found = op(x, gate, weight, gate_first, groups=2)
    halves = [t.chunk(2, dim=-1) for t in (x, gate, weight)]
    expected = torch.cat([op(a, b, c, gate_first) for a, b, c in zip(*halves, strict=True)], -1)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, gate, weight), grad),
        torch.autograd.grad(expected, (x, gate, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@every_device
@both_orders
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 4099), (3, 20000), (2, 300001)], ids=str)
def test_long_rows(
    device: str, gate_first: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    require_equal_to_truth(draw(*shape, device=device, dtype=dtype), gate_first)


@every_device
@both_orders
def test_long_groups(device: str, gate_first: bool) -> None:
    require_equal_to_truth(draw(2, 60000, device=device, dtype=torch.float32), gate_first, groups=3)


@pytest.mark.cuda
@both_orders
def test_rows_beyond_the_registers_are_composed(gate_first: bool) -> None:
    found = torchkiln.explain(op, *draw(2, 300001, device="cuda", dtype=torch.float32), gate_first)
    assert COMPOSED.format(300001) in found.forward.notes
    assert found.backward is not None
    assert COMPOSED.format(300001) in found.backward.notes
    held = torchkiln.explain(op, *draw(2, 8192, device="cuda", dtype=torch.float32), gate_first)
    assert held.forward.notes == ()
    assert [kernel.name for kernel in held.forward.kernels] == ["gated_norm_rows"]
    assert held.backward is not None
    assert [kernel.name for kernel in held.backward.kernels] == [
        "gated_norm_gradients",
        "columns::finish",
    ]


@every_device
@both_orders
@pytest.mark.parametrize("groups", [1, 8])
def test_gradients_are_reproducible(device: str, gate_first: bool, groups: int) -> None:
    rows = 4099 if device == "cuda" else 67
    tensors = draw(rows, 1024, device=device, dtype=torch.bfloat16)
    y = op(*tensors, gate_first, groups)
    grad = torch.randn_like(y)
    first = torch.autograd.grad(y, tensors, grad, retain_graph=True)
    for _ in range(5):
        for a, b in zip(
            first, torch.autograd.grad(y, tensors, grad, retain_graph=True), strict=True
        ):
            assert torch.equal(bits(a), bits(b))


@every_device
@both_orders
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gates_far_from_0(device: str, gate_first: bool, dtype: torch.dtype) -> None:
    """The derivative of silu is accurate where its terms would cancel in float32."""
    gate = torch.linspace(-80, 80, 128, device=device, dtype=torch.float64).to(dtype)
    x, _, weight = draw(2, 128, device=device, dtype=dtype)
    tensors = (x, gate.expand(2, -1).clone().requires_grad_(), weight)
    require_equal_to_truth(tensors, gate_first)
    y = op(*tensors, gate_first=False)
    (grad,) = torch.autograd.grad(y, tensors[1], torch.ones_like(y))
    expected = truth(*tensors, gate_first=False)
    (exact,) = torch.autograd.grad(expected, tensors[1], torch.ones_like(expected))
    smallest = torch.finfo(dtype).smallest_normal
    step = 2e-3 if dtype == torch.float16 else 1e-5
    assert ((grad - exact).abs() <= step * exact.abs() + smallest).all()


@every_device
@both_orders
def test_parts_of_a_projection_are_not_copied(device: str, gate_first: bool) -> None:
    projection = torch.randn(4, 6, 96, device=device)
    gate, x = projection[..., :32], projection[..., 64:]
    found = torchkiln.explain(op, x, gate, torch.ones(32, device=device), gate_first)
    assert found.forward.notes == ()
    y = op(x, gate, torch.ones(32, device=device), gate_first)
    assert torch.equal(
        y, op(x.contiguous(), gate.contiguous(), torch.ones(32, device=device), gate_first)
    )


def test_the_module_has_the_state_of_torchs() -> None:
    theirs = nn.RMSNorm(24, eps=1e-3)
    nn.init.normal_(theirs.weight)
    ours = torchkiln.nn.GatedRMSNorm(24, eps=1e-3)
    ours.load_state_dict(theirs.state_dict())
    x, gate = torch.randn(2, 5, 24)
    torch.testing.assert_close(ours(x, gate), theirs(x) * F.silu(gate))
    first = torchkiln.nn.GatedRMSNorm(24, eps=1e-3, gate_first=True, groups=3, offset=1.0)
    assert (first.weight == 0).all()
    assert repr(first) == f"Gated{repr(theirs)[:-1]}, gate_first=True, groups=3, offset=1.0)"
    rows = (x * F.silu(gate)).unflatten(-1, (3, 8))
    torch.testing.assert_close(first(x, gate), F.rms_norm(rows, (8,), eps=1e-3).flatten(-2))


@pytest.mark.parametrize(
    ("module", "now"),
    [
        (MambaNorm(24, 24), "gated_rms_norm(gate_first=True)"),
        (MambaNorm(24, 8), "gated_rms_norm(gate_first=True, groups=3)"),
        (QwenNorm(24), "gated_rms_norm"),
    ],
    ids=["Mamba2", "groups", "Qwen3-Next"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replace_finds_the_formula(module: Any, now: str, dtype: torch.dtype) -> None:
    module = copy.deepcopy(module).to(dtype)
    nn.init.normal_(module.weight)
    x, gate = torch.randn(2, 3, 24, dtype=dtype), torch.randn(2, 3, 24, dtype=dtype)
    expected = module(x, gate)
    report = torchkiln.replace(nn.Sequential(module))
    assert report["0"].now == now
    torch.testing.assert_close(module(x, gate), expected)
    module.variance_epsilon = 0.5
    assert not torch.allclose(module(x, gate), expected)


def test_replace_leaves_calls_without_a_gate() -> None:
    module = MambaNorm(24, 24)
    x = torch.randn(2, 24)
    expected = module(x), module(x, None)
    torchkiln.replace(nn.Sequential(module))
    assert type(module) is not MambaNorm
    assert all(torch.equal(module(*args), expected[0]) for args in ((x,), (x, None)))
    assert torch.equal(expected[0], expected[1])


def test_replace_leaves_another_gate() -> None:
    class SigmoidNorm(QwenNorm):
        def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
            return F.rms_norm(hidden_states, (24,), self.weight, 1e-6) * gate.sigmoid()

    report = torchkiln.replace(nn.Sequential(SigmoidNorm(24)))
    assert not report["0"].changed


def test_special_values() -> None:
    """An infinity makes the other results 0, as in rms_norm; a gate of 0 makes all of them NaN."""
    x = torch.tensor([[1.0, math.inf, -2.0, 0.0]])
    open_gate = torch.full_like(x, 2.0)
    y = torchkiln.gated_rms_norm(x, open_gate, 4)
    assert y[0, 1].isnan()
    assert (y[0, [0, 2, 3]] == 0).all()
    closed = torchkiln.gated_rms_norm(x, torch.zeros_like(x), 4, gate_first=True)
    assert closed.isnan().all()
