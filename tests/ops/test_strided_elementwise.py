"""Elementwise ops compute the same for every layout of their operands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchkiln

LAYOUTS = {
    "long rows": ((40, 1027), (1035, 1)),
    "short rows": ((700, 12), (20, 1)),
    "short rows for several threads": ((9001, 7), (9, 1)),
    "short rows in planes": ((5, 90, 7), (1000, 10, 1)),
    "the longest short rows": ((37, 128), (130, 1)),
    "rows after the longest short ones": ((37, 129), (130, 1)),
    "a column": ((5000, 1), (9, 1)),
    "every second element": ((3, 2050), (4100, 2)),
    "transposed": ((300, 30), (1, 300)),
    "transposed rows of a wider tensor": ((130, 70), (1, 133)),
    "three transposed columns": ((2100, 3), (1, 2100)),
}

OPS: dict[str, Callable[..., Tensor]] = {
    "silu": torchkiln.silu,
    "tanh": torchkiln.tanh,
    "swiglu": torchkiln.swiglu,
    "geglu": torchkiln.geglu,
    "bias_act": lambda x, bias: torchkiln.bias_act(x, bias.detach().flatten(0, -2)[0], scale=1.7),
    "dropout_add": lambda x, residual: torchkiln.dropout_add(x, residual, 0.3),
    "muladd": torchkiln.muladd,
}
OPERANDS = {"silu": 1, "tanh": 1, "muladd": 3}


def results(op: str, operands: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The result, and the gradients of all operands except a bias."""
    leaves = [t.detach().requires_grad_() for t in operands]
    torch.manual_seed(0)
    found = OPS[op](*leaves)
    wanted = leaves[:1] if op == "bias_act" else leaves
    return [found.detach(), *torch.autograd.grad(found, wanted, grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_as_contiguous(device: torch.device, op: str, layout: str, dtype: torch.dtype) -> None:
    shape, strides = LAYOUTS[layout]
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1

    def strided() -> Tensor:
        return torch.randn(reach, device=device).to(dtype).as_strided(shape, strides)

    operands, grad = [strided() for _ in range(OPERANDS.get(op, 2))], strided()
    expected = results(op, [t.contiguous() for t in operands], grad.contiguous())
    for incoming in (grad, grad.contiguous()):
        for found, wanted in zip(results(op, operands, incoming), expected, strict=True):
            torch.testing.assert_close(found, wanted)
