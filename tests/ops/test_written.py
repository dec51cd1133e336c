"""Ops that write into tensors of the caller: norms and swiglu with out=, add_*_norm_."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchkiln

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = ((7, 13), (2, 3, 128), (5, 1025), (3, 17001), (1, 200003), (0, 5))
every_case = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=str)


def drawn(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


NORMS = [(torchkiln.rms_norm, 1), (torchkiln.layer_norm, 2)]
SUM_NORMS = [
    (torchkiln.add_rms_norm, torchkiln.add_rms_norm_, 1),
    (torchkiln.add_layer_norm, torchkiln.add_layer_norm_, 2),
]
OPTIONS = {"eps": 1e-3, "offset": 1.0, "round": "input"}


@every_case
@every_dtype
@pytest.mark.parametrize(("norm", "count"), NORMS)
def test_the_norm(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    norm: Callable[..., Tensor],
    count: int,
) -> None:
    x = drawn(shape, device, dtype)
    owned = [drawn(shape[-1:], device, dtype) for _ in range(count)]
    expected = norm(x, shape[-1], *owned, **OPTIONS)
    out = torch.full_like(x, 7)
    assert norm(x, shape[-1], *owned, **OPTIONS, out=out) is out
    assert torch.equal(out, expected)
    norm(x, shape[-1], *owned, **OPTIONS, out=x)
    assert torch.equal(x, expected)


@every_case
@every_dtype
@pytest.mark.parametrize(("norm", "in_place", "count"), SUM_NORMS)
def test_the_norm_of_a_sum(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    norm: Callable[..., tuple[Tensor, Tensor]],
    in_place: Callable[..., tuple[Tensor, Tensor]],
    count: int,
) -> None:
    x, residual = drawn(shape, device, dtype), drawn(shape, device, dtype)
    owned = [drawn(shape[-1:], device, dtype) for _ in range(count)]
    y, total = norm(x, residual, shape[-1], *owned, **OPTIONS)
    memory = x.data_ptr(), residual.data_ptr()
    found = in_place(x, residual, shape[-1], *owned, **OPTIONS)
    assert found[0] is x
    assert found[1] is residual
    assert (x.data_ptr(), residual.data_ptr()) == memory
    assert torch.equal(x, y)
    assert torch.equal(residual, total)


@every_case
@every_dtype
def test_the_gate(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate, up = drawn(shape, device, dtype), drawn(shape, device, dtype)
    packed = torch.cat([gate, up], -1)
    expected = torchkiln.swiglu(gate, up)
    out = torch.full_like(gate, 7)
    assert torchkiln.swiglu(gate, up, out=out) is out
    assert torch.equal(out, expected)
    torchkiln.swiglu(packed, out=out.zero_())
    assert torch.equal(out, expected)
    torchkiln.swiglu(gate, up, out=gate)
    assert torch.equal(gate, expected)


def test_strided_inputs(device: torch.device) -> None:
    wide = torch.randn(6, 40, device=device)
    x = wide[:, 3:23]
    out = torch.empty(6, 20, device=device)
    torchkiln.rms_norm(x, 20, out=out)
    assert torch.equal(out, torchkiln.rms_norm(x, 20))
    torchkiln.swiglu(x, out=out[:, :10].contiguous())


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


def test_a_gradient_is_refused_and_versions_count() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    for call in (
        lambda: torchkiln.rms_norm(x, 8, out=torch.empty(4, 8)),
        lambda: torchkiln.layer_norm(x, 8, out=torch.empty(4, 8)),
        lambda: torchkiln.add_rms_norm_(torch.ones(4, 8), torch.ones(4, 8), 8, x[0]),
        lambda: torchkiln.add_layer_norm_(torch.ones(4, 8), torch.ones(4, 8), 8, None, x[0]),
        lambda: torchkiln.swiglu(x, x, out=torch.empty(4, 8)),
    ):
        with pytest.raises(RuntimeError, match=r"expected none: the call has no gradient"):
            call()
        with torch.no_grad():
            call()
    y = x.exp()
    with torch.no_grad():
        torchkiln.rms_norm(y, 8, out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        z = torch.ones(4, 8)
        torchkiln.rms_norm(z, 8, out=z)


def test_the_ops_are_well_defined(device: torch.device) -> None:
    x, other, weight = (torch.randn(4, 8, device=device) for _ in range(3))
    ops = torch.ops.torchkiln
    settings = (0.0, "once", other)
    torch.library.opcheck(ops.rms_norm_out.default, (x, [8], weight[0], None, *settings))
    torch.library.opcheck(ops.layer_norm_out.default, (x, [8], weight[0], None, 1e-5, *settings))
    torch.library.opcheck(ops.add_rms_norm_.default, (x, other, [8], weight[0], 1e-5))
    torch.library.opcheck(ops.add_layer_norm_.default, (x, other, [8], weight[0], weight[1]))
    torch.library.opcheck(ops.swiglu_out.default, (x, other, weight))


def test_compiled_calls(device: torch.device) -> None:
    def step(x: Tensor, residual: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torchkiln.add_rms_norm_(x, residual, 8)
        torchkiln.rms_norm(x, 8, out=out)
        return x * 2, residual + 1, torchkiln.swiglu(out, out=torch.empty_like(out[:, :4]))

    given = [torch.randn(4, 8, device=device) for _ in range(3)]
    copies = [x.clone() for x in given]
    expected = step(*given)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(*copies)
    for one, other in zip((*found, *copies), (*expected, *given), strict=True):
        torch.testing.assert_close(one, other)
