"""Ops that write into the caller's tensors, also over their input, and calls that are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchkiln

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((7, 13), (2, 3, 128), (3, 17001), (1, 200003))
every_case = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


NORMS = [(torchkiln.rms_norm, 1), (torchkiln.layer_norm, 2)]
OPTIONS = {"eps": 1e-3, "offset": 1.0, "round": "input"}


@every_case
@every_dtype
@pytest.mark.parametrize(("norm", "count"), NORMS)
def test_a_norm_over_its_input(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    norm: Callable[..., Tensor],
    count: int,
) -> None:
    x = drawn(shape, device, dtype)
    owned = [drawn(shape[-1:], device, dtype) for _ in range(count)]
    expected = norm(x, shape[-1], *owned, **OPTIONS)
    norm(x, shape[-1], *owned, **OPTIONS, out=x)
    assert torch.equal(x, expected)


@every_case
@every_dtype
def test_a_gate_over_its_input(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    gate, up = drawn(shape, device, dtype), drawn(shape, device, dtype)
    expected = torchkiln.swiglu(gate, up)
    torchkiln.swiglu(gate, up, out=gate)
    assert torch.equal(gate, expected)


def test_no_memory_is_allocated(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("counts the allocations of a GPU")
    x, residual = (torch.randn(64, 128, device=device) for _ in range(2))
    out = torch.empty_like(x)
    torchkiln.add_rms_norm_(x, residual, 128)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torchkiln.add_rms_norm_(x, residual, 128)
    torchkiln.rms_norm(x, 128, out=out)
    torchkiln.swiglu(x, residual, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


X = torch.randn(4, 8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: torchkiln.rms_norm(X, 8, out=X[:3].clone()), "out: got float32 [3, 8], expected"),
        (lambda: torchkiln.rms_norm(X, 8, out=X.double()), "out: got float64 [4, 8], expected"),
        (lambda: torchkiln.rms_norm(X, 8, out=X.T.contiguous().T), "expected a contiguous tensor"),
        (lambda: torchkiln.rms_norm(X, 7, out=X.clone()), "normalized_shape: got [7]"),
        (lambda: torchkiln.swiglu(X, out=X.clone()), "out: got float32 [4, 8], expected"),
        (lambda: torchkiln.swiglu(X[:, :7], out=X), "expected an even one"),
        (lambda: torchkiln.add_rms_norm_(X, X.double(), 8), "residual: got dtype float64"),
        (lambda: torchkiln.add_rms_norm_(X.half(), X.clone(), 8), "residual: got float32"),
        (lambda: torchkiln.add_rms_norm_(X[:, ::2], X[:, 1::2], 4), "expected a contiguous tensor"),
        (lambda: torchkiln.add_rms_norm_(X, X, 8), "memory location"),
        (lambda: torchkiln.rms_norm(X[:3], 8, out=X[1:]), "memory location"),
    ],
)
def test_refused_calls(call: Callable[[], object], words: str) -> None:
    before = X.clone()
    with pytest.raises(RuntimeError) as error:
        call()
    assert words in str(error.value)
    assert torch.equal(X, before)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: torchkiln.rms_norm(X, 8, round="up", out=X.clone()), "rms_norm"),  # type: ignore[arg-type]
        (lambda: torchkiln.add_layer_norm_(X.clone(), X.clone(), 8, round="up"), "add_layer_norm_"),  # type: ignore[arg-type]
    ],
)
def test_errors_name_the_function(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=rf"torchkiln\.{name}: round: got 'up', expected one of"):
        call()
