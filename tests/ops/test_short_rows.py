"""Short rows, few pixels and long planes on a CPU: values, and the same bits with any threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln

DTYPES = [torch.float32, torch.bfloat16]


def check(op: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Compare result and gradients with a formula in float64, and two numbers of threads."""
    grad = torch.randn_like(op(*inputs))
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            leaves = [x.detach().requires_grad_() for x in inputs]
            y = op(*leaves)
            found.append([y, *torch.autograd.grad(y, leaves, grad)])
        finally:
            torch.set_num_threads(before)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    y = formula(*wide)
    expected = [y, *torch.autograd.grad(y, wide, grad.double())]
    eps = torch.finfo(inputs[0].dtype).eps
    for one, other, truth in zip(*found, expected, strict=True):
        assert torch.equal(one, other)
        error = (one.double() - truth).abs().max()
        # Results are rounded once, sums of n terms of size 1 in float32: their size is sqrt(n).
        size, usual = truth.abs().max().clamp(1), (grad.numel() / truth.numel()) ** 0.5
        assert error < 8 * (eps * size + torch.finfo(torch.float32).eps * usual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(70001, 3), (9001, 7), (33, 15), (3000, 40)])
@pytest.mark.parametrize("transposed", [False, True])
def test_norms(rows: int, columns: int, transposed: bool, dtype: torch.dtype) -> None:
    shape = (columns,)
    x, r = (torch.randn(rows, columns).to(dtype) for _ in range(2))
    if transposed:
        x, r = x.T.contiguous().T, r.T.contiguous().T
    w, b = torch.randn(columns).to(dtype), torch.randn(columns).to(dtype)
    check(
        lambda x, w, b: torchkiln.layer_norm(x, shape, w, b, eps=1.0),
        lambda x, w, b: F.layer_norm(x, shape, w, b, 1.0),
        [x, w, b],
    )
    y, total = torchkiln.add_rms_norm(x, r, shape, w, eps=1.0)
    assert torch.equal(total, x + r)
    expected = F.rms_norm(total.double(), shape, w.double(), 1.0)
    error = (y.double() - expected).abs().max()
    assert error < 4 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (777, 8), (70, 31), (131, 64), (33, 127)])
def test_norms_of_spaced_rows(rows: int, columns: int, dtype: torch.dtype) -> None:
    """NaN stays in its row, and behind the columns. The mean is 50 times the deviation."""
    shape = (columns,)
    x, r = torch.full((2, rows, columns + 3), torch.nan).to(dtype)[..., :columns]
    x.copy_(torch.randn(rows, columns) + (1 if dtype.itemsize == 2 else 50))
    r.copy_(torch.randn(rows, columns))
    w, b = torch.randn(2, columns).to(dtype)
    x[rows // 2, columns // 2] = torch.nan
    finite = torch.arange(rows) != rows // 2
    total = x + r
    for z, (y, other) in (
        (total, torchkiln.add_layer_norm(x, r, shape, w, b)),
        (x, (torchkiln.layer_norm(x, shape, w, b), x)),
    ):
        assert torch.equal(other[finite], z[finite])
        expected = F.layer_norm(z.double(), shape, w.double(), b.double())
        error = (y.double() - expected)[finite].abs()
        assert (
            error <= 32 * torch.finfo(torch.float32).eps + y[finite].abs() * torch.finfo(dtype).eps
        ).all()
        assert y[~finite].isnan().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("columns", [4, 5, 16, 17, 31, 48, 127, 128, 129])
def test_softmax(columns: int, gap: int, dtype: torch.dtype) -> None:
    x = torch.randn(3001, columns + gap).mul(4).to(dtype)[:, :columns]
    for op in ("softmax", "log_softmax"):
        check(
            lambda x, op=op: getattr(torchkiln, op)(x, 1, scale=0.5),
            lambda x, op=op: getattr(F, op)(x * 0.5, 1),
            [x],
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5, 16, 40])
def test_softmax_of_rows_that_are_not_finite(columns: int, dtype: torch.dtype) -> None:
    """Infinity and NaN act on their row alone."""
    x = torch.randn(100, columns).to(dtype)
    x[3] = -torch.inf
    x[10, 1] = -torch.inf
    x[50, 2] = torch.inf
    x[70, columns - 1] = torch.nan
    for op in ("softmax", "log_softmax"):
        found, expected = getattr(torchkiln, op)(x, 1), getattr(F, op)(x.double(), 1)
        assert torch.equal(found.isnan(), expected.isnan())
        torch.testing.assert_close(found, expected.to(dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "columns", "groups"), [(30001, 2, 1), (5000, 12, 4), (40, 900, 450), (50, 700, 1)]
)
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norms(
    tokens: int, columns: int, groups: int, gate_first: bool, dtype: torch.dtype
) -> None:
    def formula(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
        z = x * F.silu(gate) if gate_first else x
        rows = z.unflatten(-1, (groups, -1))
        n = F.rms_norm(rows, rows.shape[-1:], eps=1.0).flatten(-2) * w
        return n if gate_first else n * F.silu(gate)

    x, gate = (torch.randn(tokens, columns).to(dtype) for _ in range(2))
    w = torch.randn(columns).to(dtype)
    check(
        lambda x, gate, w: torchkiln.gated_rms_norm(
            x, gate, (columns,), w, 1.0, gate_first=gate_first, groups=groups
        ),
        formula,
        [x, gate, w],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (25, 296, 3),
        (70, 1300),
        (9000, 5),
        (2003, 7, 5),  # runs of several samples
        (31, 4, 60),
        (3, 20000, 1),
        (40, 38, 4, 7),
        (1, 2, 90001),
        (2, 1, 70000),
    ],
)
def test_batch_norm(shape: tuple[int, ...], training: bool, dtype: torch.dtype) -> None:
    channels = shape[1]
    mean, var = torch.randn(channels), torch.rand(channels) + 0.5

    def formula(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        m, v = (None, None) if training else (mean.to(x.dtype), var.to(x.dtype))
        return F.silu(F.batch_norm(x, m, v, w, b, training=training, eps=1.0))

    def op(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        m, v = (None, None) if training else (mean, var)
        return torchkiln.bn_act(x, w, b, m, v, training=training, eps=1.0, act="silu")

    w, b = torch.randn(channels), torch.randn(channels)
    check(op, formula, [torch.randn(shape).to(dtype) + 2, w, b])
