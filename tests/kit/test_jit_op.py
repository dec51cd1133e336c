"""torchkiln.jit.op: kernels registered as torch ops, checked by the contract."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from torchkiln import jit
from torchkiln.testing import Case, Invalid, Sample
from torchkiln.testing.data import normal

KERNELS = """
__device__ float clamp(float x, float lo, float hi) { return x < lo ? lo : x > hi ? hi : x; }
__global__ void forward(const float* x, const float* gate, float* y, float lo, float hi, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = clamp(x[i], lo, hi) * gate[i];
}
__global__ void backward(const float* grad, const float* x, const float* gate, float* grad_x,
                         float* grad_gate, float lo, float hi, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  grad_x[i] = x[i] >= lo && x[i] <= hi ? grad[i] * gate[i] : 0.0f;
  grad_gate[i] = grad[i] * clamp(x[i], lo, hi);
}
"""


@cache
def kernels() -> jit.Module:
    """The kernels; they are compiled at the first launch on a GPU."""
    return jit.inline(KERNELS)


def check(x: Tensor, gate: Tensor, lo: float, hi: float) -> None:
    if x.dtype != torch.float32 or gate.dtype != torch.float32:
        raise TypeError(f"jit_tests.clamp_gate: got {x.dtype} and {gate.dtype}, expected float32")
    if x.shape != gate.shape:
        raise ValueError(
            f"jit_tests.clamp_gate: gate: got shape {list(gate.shape)}, expected {list(x.shape)}"
        )
    if lo > hi:
        raise ValueError(f"jit_tests.clamp_gate: lo: got {lo}, expected at most hi, {hi}")


def clamp_gate_cuda(x: Tensor, gate: Tensor, lo: float, hi: float) -> Tensor:
    x, gate = x.contiguous(), gate.contiguous()
    y = torch.empty_like(x)
    if n := x.numel():
        kernels().forward[-(-n // 256), 256](x, gate, y, lo, hi, n)
    return y


def gradient(grad: Tensor, x: Tensor, gate: Tensor, lo: float, hi: float) -> tuple[Tensor, Tensor]:
    grad, x, gate = grad.contiguous(), x.contiguous(), gate.contiguous()
    grad_x, grad_gate = torch.empty_like(x), torch.empty_like(x)
    if n := x.numel():
        kernels().backward[-(-n // 256), 256](grad, x, gate, grad_x, grad_gate, lo, hi, n)
    return grad_x, grad_gate


def formula(x: Tensor, gate: Tensor, lo: float = 0.0, hi: float = 1.0) -> Tensor:
    return x.contiguous().clamp(lo, hi) * gate.contiguous()


CLAMP_GATE = jit.op(
    "jit_tests::clamp_gate(Tensor x, Tensor gate, float lo=0.0, float hi=1.0) -> Tensor",
    clamp_gate_cuda,
    reference=formula,
    gradient=gradient,
    check=check,
)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"typical": (6, 10), "0-dim": (), "empty": (0, 3), "odd": (7, 13)}.items():
        yield Sample(name, tuple(normal(key, shape, device, dtype) for key in ("x", "gate")))
    pair = tuple(normal(key, (5, 9), device, dtype) for key in ("x", "gate"))
    yield Sample("limits", (*pair, -0.5, 0.5))


def invalid(device: torch.device) -> Iterator[Invalid]:
    x = torch.ones(4, device=device)
    prefix = r"jit_tests\.clamp_gate: "
    yield Invalid(
        "shapes", (x, x[:3]), ValueError, prefix + r"gate: got shape \[3\], expected \[4\]"
    )
    limits = prefix + r"lo: got 2\.0, expected at most hi, 1\.0"
    yield Invalid("limits", (x, x, 2.0, 1.0), ValueError, limits)


SPEC = CLAMP_GATE.spec(
    inputs=inputs,
    invalid=invalid,
    magnitude=lambda x, gate, lo=0.0, hi=1.0: formula(x, gate, lo, hi).abs(),
    bench=lambda device, dtype, shape: Sample(
        "bench", tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    ),
    dtypes=(torch.float32,),
    excluded={
        "gradcheck": "it needs float64, and the kernels are for float32",
        "gradgradcheck": "it needs float64, and the kernels are for float32",
        "autocast": "the kernels are for float32",
    },
)


@pytest.mark.contract([SPEC])
def test_contract(contract_case: Case) -> None:
    contract_case.run()


def test_second_derivatives() -> None:
    x, gate = (torch.randn(50, requires_grad=True) for _ in range(2))
    (first,) = torch.autograd.grad(CLAMP_GATE(x, gate).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), gate)
    assert second.tolist() == ((x >= 0) & (x <= 1)).float().tolist()


def test_an_op_with_two_results_and_no_gradient() -> None:
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, x + y

    op = jit.op("jit_tests::both(Tensor x, Tensor y) -> (Tensor, Tensor)", both, reference=both)
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    product, total = torch.compile(op, backend="aot_eager", fullgraph=True)(x, y)
    found = torch.autograd.grad(product.sum() + 2 * total.sum(), (x, y))
    torch.testing.assert_close(found, (y + 2, x + 2))


def test_a_wrong_schema() -> None:
    with pytest.raises(ValueError, match=r"schema: got 'f\(x\)', expected a schema such as"):
        jit.op("f(x)", formula, reference=formula)
