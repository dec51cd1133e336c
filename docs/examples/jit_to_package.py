"""An op, from a formula to the start of a package: clamp(x, lo, hi) * gate.

Usage: python jit_to_package.py. Without a GPU everything but the kernels runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchkiln import bench, jit, testing

# 1. The formula. Forward is one kernel; the gradients of x and gate are one kernel.
by_formula = jit.elementwise(
    "clamp(x, lo, hi) * gate", "x, gate, lo: float, hi: float", name="clamp_gate"
)

# 2. Kernels by hand, for ops that no formula describes. These compute the formula of step 1.
KERNELS = """
#include <cstdint>

__global__ void forward(const float* x, const float* gate, float* y, float lo, float hi,
                        int64_t n) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < n) y[i] = fminf(fmaxf(x[i], lo), hi) * gate[i];
}

__global__ void backward(const float* grad, const float* x, const float* gate, float* grad_x,
                         float* grad_gate, float lo, float hi, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= n) return;
  const bool inside = x[i] >= lo && x[i] <= hi;
  grad_x[i] = inside ? grad[i] * gate[i] : 0.0f;
  grad_gate[i] = grad[i] * fminf(fmaxf(x[i], lo), hi);
}
"""
THREADS = 256


def launch(x: Tensor, gate: Tensor, lo: float, hi: float) -> Tensor:
    """Computes the result on a GPU."""
    x, gate = x.contiguous(), gate.contiguous()
    y = torch.empty_like(x)
    n = x.numel()
    jit.inline(KERNELS).forward[-(-n // THREADS), THREADS](x, gate, y, lo, hi, n)
    return y


def launch_backward(
    grad: Tensor, x: Tensor, gate: Tensor, lo: float, hi: float
) -> tuple[Tensor, Tensor]:
    """Computes both gradients on a GPU, in one pass."""
    grad, x, gate = grad.contiguous(), x.contiguous(), gate.contiguous()
    grad_x, grad_gate = torch.empty_like(x), torch.empty_like(gate)
    n = x.numel()
    kernel = jit.inline(KERNELS).backward
    kernel[-(-n // THREADS), THREADS](grad, x, gate, grad_x, grad_gate, lo, hi, n)
    return grad_x, grad_gate


def formula(x: Tensor, gate: Tensor, lo: float, hi: float) -> Tensor:
    """The op in torch: it runs on the CPU and is the reference of the tests."""
    return x.clamp(lo, hi) * gate


def check(x: Tensor, gate: Tensor, lo: float, hi: float) -> None:
    """Raises for tensors that the kernels do not support, before a launch."""
    del lo, hi
    for name, tensor in (("x", x), ("gate", gate)):
        if tensor.dtype != torch.float32 or tensor.shape != x.shape or tensor.numel() == 0:
            got = f"{tensor.dtype} of shape {list(tensor.shape)}"
            wanted = f"torch.float32 of shape {list(x.shape)}, not empty"
            raise ValueError(f"example::clamp_gate: {name}: got {got}, expected {wanted}")


by_hand = jit.op(
    "example::clamp_gate(Tensor x, Tensor gate, float lo, float hi) -> Tensor",
    launch,
    reference=formula,
    gradient=launch_backward,
    check=check,
)


def compare() -> None:
    """Compares values and gradients of both ops with torch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, gate, grad = torch.randn(3, 1000, device=device).unbind()
    for op in (by_formula, by_hand):
        leaves = (x.clone().requires_grad_(), gate.clone().requires_grad_())
        found = torch.autograd.grad(op(*leaves, -1.0, 0.5), leaves, grad)
        expected = torch.autograd.grad(formula(*leaves, -1.0, 0.5), leaves, grad)
        torch.testing.assert_close(found, expected)


# 3. The contract. Inputs, tolerances and invalid calls follow from the formula.
CHECKS = ("values", "strides", "gradient_values", "gradcheck", "gradgradcheck", "bad_input")


def hold_to_contract() -> int:
    """Runs the checks and returns their number."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [c for c in testing.cases([by_formula.spec()], device) if c.check.name in CHECKS]
    for case in cases:
        case.run()
    return len(cases)


# 4. The time, beside the torch ops that it replaces.
def measure(rows: int = 256) -> bench.Comparison:
    """Times the formula's op and torch's ops in one run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, gate = torch.randn(2, rows, 1024, device=device).unbind()

    def torchkiln_op(x: Tensor, gate: Tensor) -> Tensor:
        return by_formula(x, gate, -1.0, 0.5)

    def torch_ops(x: Tensor, gate: Tensor) -> Tensor:
        return formula(x, gate, -1.0, 0.5)

    return bench.compare(torchkiln_op, torch_ops, x, gate)


def main() -> None:
    """Runs all steps."""
    compare()
    print("values and gradients agree with torch")
    print(hold_to_contract(), "checks of the contract passed")
    print(measure())
    if not torch.cuda.is_available():
        print("on the CPU the op runs the same torch calls and adds host time: a GPU is needed")
    print("5. For a package with compiled C++ and CUDA, type: torchkiln new NAME")


if __name__ == "__main__":
    main()
