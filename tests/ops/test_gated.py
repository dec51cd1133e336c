"""Gated linear units beyond the contract: one tensor or two, layouts, modules, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln
from torchkiln.ops.gated import geglu_tanh
from torchkiln.testing import OpSpec
from torchkiln.testing.specs import FAMILIES

SPECS = FAMILIES["gated"]
every_op = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


@every_op
@pytest.mark.parametrize("shape", [(6,), (5, 8), (3, 4, 130), (2, 0), (0, 4)])
def test_packed_is_two(device: torch.device, spec: OpSpec, shape: tuple[int, ...]) -> None:
    """A packed tensor, and its two halves as arguments, have equal results and gradients."""
    packed = torch.randn(shape, device=device, requires_grad=True)
    gate, up = (t.detach().requires_grad_() for t in packed.chunk(2, -1))
    one, two = spec.op(packed), spec.op(gate, up)
    assert torch.equal(one, two)
    grad = torch.randn_like(one)
    (whole,) = torch.autograd.grad(one, packed, grad)
    halves = torch.autograd.grad(two, (gate, up), grad)
    assert torch.equal(whole, torch.cat(halves, dim=-1))


@every_op
def test_gate_and_up_may_be_one_tensor(device: torch.device, spec: OpSpec) -> None:
    x = torch.randn(5, 6, device=device, dtype=torch.float64, requires_grad=True)
    expected = spec.composite(x, x)
    torch.testing.assert_close(spec.op(x, x), expected)
    grads = [torch.autograd.grad(f(x, x).sum(), x)[0] for f in (spec.op, spec.composite)]
    torch.testing.assert_close(*grads)


@every_op
def test_layouts_differ(device: torch.device, spec: OpSpec) -> None:
    """Operands may have different strides; the result is contiguous."""
    gate = torch.randn(2, 3, 5, 7, device=device).to(memory_format=torch.channels_last)
    up = torch.randn(7, 5, 3, 2, device=device).permute(3, 2, 1, 0)
    found = spec.op(gate, up)
    assert found.is_contiguous()
    torch.testing.assert_close(found, spec.composite(gate, up).contiguous())


@every_op
def test_operands_in_one_order_give_results_in_it(device: torch.device, spec: OpSpec) -> None:
    """As in torch: a result in another order would transpose both operands."""
    for x in (torch.randn(9, 4, device=device).mT, torch.randn(2, 5, 3, 7, device=device)):
        if x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)  # noqa: PLW2901
        gate, up = x.detach().requires_grad_(), (x + 1).requires_grad_()
        found = spec.op(gate, up)
        assert found.stride() == gate.stride() == spec.composite(gate, up).stride()
        assert torch.equal(found, spec.op(gate.contiguous(), up.contiguous()))
        for grad in (torch.randn_like(found), torch.randn(found.shape, device=device)):
            grads = torch.autograd.grad(found, (gate, up), grad, retain_graph=True)
            assert [one.stride() for one in grads] == [gate.stride()] * 2
            expected = torch.autograd.grad(spec.composite(gate, up), (gate, up), grad)
            torch.testing.assert_close(grads, expected)
        part = gate[1:, 1:].detach()  # not dense
        assert spec.op(part, part).is_contiguous()


@every_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(
    device: torch.device, spec: OpSpec, dtype: torch.dtype
) -> None:
    """The activation is not rounded before the multiplication."""
    gate, up = (torch.randn(67, 129, device=device).to(dtype) for _ in range(2))
    exact = spec.reference(gate.double(), up.double())
    info = torch.finfo(dtype)
    allowed = (
        (0.5 + 2**-4) * info.eps * exact.abs() + 1e-6 * up.double().abs() + info.smallest_normal
    )
    assert (spec.op(gate, up).double() - exact).abs().le(allowed).all()


def test_geglu_chooses(device: torch.device) -> None:
    x = torch.randn(5, 8, device=device)
    assert torch.equal(torchkiln.geglu(x, approximate="tanh"), geglu_tanh(x))
    assert torch.equal(torchkiln.geglu(x, x, "tanh"), geglu_tanh(x, x))
    words = r"torchkiln\.geglu: approximate: got 'erf', expected 'none' or 'tanh'"
    with pytest.raises(RuntimeError, match=words):
        torchkiln.geglu(x, None, "erf")  # type: ignore[arg-type]


def plain_swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    first, second = gate.chunk(2, -1) if up is None else (gate, up)
    return F.silu(first) * second


def plain_geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    first, second = gate.chunk(2, -1) if up is None else (gate, up)
    return F.gelu(first, approximate=approximate) * second


@pytest.mark.parametrize(
    ("module", "plain", "shown"),
    [
        (torchkiln.nn.SwiGLU(), plain_swiglu, "SwiGLU()"),
        (torchkiln.nn.GEGLU(), plain_geglu, "GEGLU(approximate='none')"),
        (
            torchkiln.nn.GEGLU("tanh"),
            lambda gate, up=None: plain_geglu(gate, up, "tanh"),
            "GEGLU(approximate='tanh')",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_modules(
    device: torch.device, module: nn.Module, plain: Callable[..., Tensor], shown: str
) -> None:
    x = torch.randn(3, 4, 10, device=device)
    torch.testing.assert_close(module(x), plain(x))
    torch.testing.assert_close(module(x, x + 1), plain(x, x + 1))
    assert repr(module) == shown
    assert module.state_dict() == {}


@every_op
def test_a_graph_has_torchs_ops(spec: OpSpec, traced: Callable[..., set[str]]) -> None:
    x = torch.randn(4, 6)
    for args in ((x, x + 1), (x,), (x, None)):
        found = traced(spec.op, *args)
        assert len(found) >= 2
        assert not any("torchkiln" in target for target in found), found


@every_op
def test_what_does_not_divide_is_refused_in_a_graph(spec: OpSpec) -> None:
    torch.compiler.reset()
    compiled = torch.compile(spec.op, backend="eager")
    with pytest.raises(RuntimeError, match=f"{spec.name}: gate: got a last dimension of size 3"):
        compiled(torch.randn(2, 3))


@pytest.mark.parametrize("op", [torchkiln.swiglu, torchkiln.geglu, geglu_tanh])
def test_shapes_that_would_broadcast(device: torch.device, op: Any) -> None:
    """The error names a call that broadcasts both; that call works and has gradients."""
    gate = torch.randn(3, 4, device=device, requires_grad=True)
    up = torch.randn(4, device=device, requires_grad=True)
    words = (
        rf"{op.__name__.lstrip('_')}: up: got shape \[4\], expected \[3, 4\], the shape of gate; "
        r"to broadcast, pass \*torch\.broadcast_tensors\(gate, up\)"
    )
    with pytest.raises(RuntimeError, match=words):
        op(gate, up)
    y = op(*torch.broadcast_tensors(gate, up))
    assert torch.equal(y, op(gate, up.repeat(3, 1)))
    y.sum().backward()
    assert up.grad is not None
    torch.testing.assert_close(up.grad, (op(gate, torch.ones_like(gate))).sum(0))
