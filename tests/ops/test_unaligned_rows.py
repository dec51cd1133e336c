"""Rows at any alignment: memory beside a row does not affect its result."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln

# So large that rows of three nearly equal numbers are not scaled up by much.
EPS = 0.1
# Vectors have 8 elements of 16 bits, or 4 of 32 bits.
SHAPES = [
    (5, 1),
    (20, 3),
    (17, 5),
    (40, 9),
    (70, 129),
    (33, 1001),
    (9, 4097),
    (7, 16385),
    (5, 50257),
]

Op = Callable[[Tensor, Tensor], Tensor]


def classes(x: Tensor) -> Tensor:
    return torch.arange(0, 2 * x.shape[0], 2, device=x.device) % x.shape[1]


OPS: dict[str, tuple[Op, Op]] = {
    "layer_norm": (
        lambda x, w: torchkiln.layer_norm(x, w.shape, w, w, EPS),
        lambda x, w: F.layer_norm(x, w.shape, w, w, EPS),
    ),
    "rms_norm": (
        lambda x, w: torchkiln.rms_norm(x, w.shape, w, EPS),
        lambda x, w: F.rms_norm(x, w.shape, w, EPS),
    ),
    "add_rms_norm": (
        lambda x, w: torchkiln.add_rms_norm(x, x, w.shape, w, EPS)[0],
        lambda x, w: F.rms_norm(x + x, w.shape, w, EPS),
    ),
    "gated_rms_norm": (
        lambda x, w: torchkiln.gated_rms_norm(x, x, w.shape, w, EPS),
        lambda x, w: F.rms_norm(x, w.shape, w, EPS) * F.silu(x),
    ),
    "softmax": (lambda x, _: torchkiln.softmax(x, -1), lambda x, _: x.softmax(-1)),
    "log_softmax": (lambda x, _: torchkiln.log_softmax(x, -1), lambda x, _: x.log_softmax(-1)),
    "cross_entropy": (
        lambda x, _: torchkiln.cross_entropy(x, classes(x), reduction="none"),
        lambda x, _: F.cross_entropy(x, classes(x), reduction="none"),
    ),
}


def between(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows alternate with NaN rows, one element after an aligned address, amid NaN."""
    memory = torch.full((rows * columns + 2,), math.nan, dtype=dtype, device=device)
    x = memory[1:-1].view(rows, columns)
    numbers = torch.randn(x[::2].shape, device=device)
    x[::2] = numbers.sign() * (1 + numbers.abs().clamp(max=1))
    return x


def require_close(op: str, x: Tensor, grad: Tensor, every: int = 1) -> None:
    """Values and gradients of every ``every``-th row agree with float64."""
    ours, torchs = OPS[op]
    weight = torch.randn(x.shape[1], device=x.device).to(x.dtype)
    leaf, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    found, expected = ours(leaf, weight), torchs(wide, weight.double())
    (grad_x,) = torch.autograd.grad(found, leaf, grad)
    (grad_wide,) = torch.autograd.grad(expected, wide, grad.double())
    # Results are rounded, and gradients computed from them: a few rounding steps are allowed.
    limit = 16 * torch.finfo(x.dtype).eps
    for one, truth in ((found, expected), (grad_x, grad_wide)):
        torch.testing.assert_close(one[::every].double(), truth[::every], rtol=limit, atol=limit)


def result_shape(op: str, x: Tensor) -> torch.Size:
    return x.shape[:1] if op == "cross_entropy" else x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_neighbours_stay_out(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], op: str
) -> None:
    """Rows between rows of NaN, and their gradients, agree with float64."""
    x = between(*shape, dtype, device)
    grad = torch.full(result_shape(op, x), math.nan, dtype=dtype, device=device)
    grad[::2] = torch.randn_like(grad[::2])
    require_close(op, x, grad, every=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [3, 129, 4097])
@pytest.mark.parametrize("op", OPS)
def test_one_row_many_times(
    device: torch.device, dtype: torch.dtype, columns: int, op: str
) -> None:
    """Expanded rows, which are one row in memory, agree with float64."""
    x = torch.randn(columns, device=device).to(dtype).expand(40, columns)
    shape = result_shape(op, x)
    require_close(op, x, torch.randn(shape[1:], device=device).to(dtype).expand(shape))
