"""Activations of half precision that the CPU looks up in tables of all 65,536 numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchkiln

Op = Callable[[Tensor], Tensor]
COMPUTED = 1 << 12  # elements of a call that computes without a table

halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
tabulated = pytest.mark.parametrize(
    "op",
    [
        torchkiln.gelu,
        torchkiln.gelu_tanh,
        torchkiln.quick_gelu,
        torchkiln.silu,
        torchkiln.sigmoid,
        torchkiln.tanh,
    ],
)


def every_number(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


def with_gradient(op: Op, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = op(x)
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


def in_parts(op: Op, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Values and gradients of parts so small that no table is used."""
    pieces = zip(x.flatten().split(COMPUTED), grad.flatten().split(COMPUTED), strict=True)
    found = [with_gradient(op, one, its) for one, its in pieces]
    return tuple(torch.cat(parts).view(x.shape) for parts in zip(*found, strict=True))  # type: ignore[return-value]


def assert_same_but_for_a_bit(found: Tensor, expected: Tensor) -> None:
    """At most 1 element in 1,000 differs, by a bit: one of both paths may fuse multiply-adds."""
    limits = torch.finfo(found.dtype)
    torch.testing.assert_close(
        found, expected, rtol=limits.eps, atol=limits.smallest_normal * limits.eps, equal_nan=True
    )
    assert (found != expected).logical_and(expected.isfinite()).sum() <= found.numel() // 1000


@halves
@tabulated
def test_the_tables_have_the_computed_results(op: Op, dtype: torch.dtype) -> None:
    x = every_number(dtype)
    grad = torch.randn(x.shape).to(dtype)
    for found, expected in zip(with_gradient(op, x, grad), in_parts(op, x, grad), strict=True):
        assert_same_but_for_a_bit(found, expected)


@halves
@pytest.mark.parametrize("layout", ["transposed", "rows", "columns", "expanded"])
def test_elements_at_any_stride(layout: str, dtype: torch.dtype) -> None:
    whole = torch.randn(300, 514).to(dtype)
    x = {
        "transposed": whole.T,
        "rows": whole[:, 1:258],
        "columns": whole[:, ::2],
        "expanded": whole[:1].expand(300, 514),
    }[layout]
    grad = torch.randn(x.shape).to(dtype)
    expected = in_parts(torchkiln.gelu, x.contiguous(), grad)
    for one, other in zip(with_gradient(torchkiln.gelu, x, grad), expected, strict=True):
        assert_same_but_for_a_bit(one, other)


@pytest.mark.parametrize("instructions", ["baseline", "avx2"])
def test_other_instruction_sets(instructions: str) -> None:
    """This file's tests pass with each instruction set; AVX-512 computes slopes without tables."""
    if instructions not in torchkiln.build_info()["cpu_instructions"]:
        pytest.skip(f"built without CPU kernels for {instructions}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__, "-k", "not instruction_sets"],
        env={**os.environ, "TORCHKILN_CPU_ISA": instructions},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "20 passed" in done.stdout
