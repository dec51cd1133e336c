"""Norms that write E4M3: bits equal quantize() of the norm, gradients equal the norm's."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from producers import (
    DEVICES,
    DTYPES,
    PRODUCT_DEVICES,
    Op,
    draw,
    parts,
    require_equal,
    require_like_plain,
    to_meta,
)
from torch import Tensor

import torchkiln
from torchkiln import quantize


class Norm(NamedTuple):
    """A norm with its E4M3 form, the overload, and whether it has a mean and a residual."""

    op: Op
    overload: Any
    centered: bool
    residual: bool


NORMS = {
    name: Norm(
        Op(getattr(torchkiln, name), getattr(torchkiln, f"{name}_fp8")),
        getattr(torch.ops.torchkiln, f"{name}_fp8").default,
        centered="layer" in name,
        residual="add" in name,
    )
    for name in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
}
# Rows of one element, one block, parts of blocks; rows that are read as single elements, by a block
# or a cluster of threads, by a warp or less; rows that are split.
SHAPES = (
    *((1, 1), (3, 8), (5, 128), (4, 136), (7, 300), (2, 3, 520), (9, 2048), (513, 256)),
    *((3, 4096), (5, 1024), (2, 5120), (2, 20000), (2, 40001), (1, 300000), (0, 16), (5, 0)),
)


def arguments(
    norm: Norm, shape: tuple[int, ...], dtype: torch.dtype, device: str, **others: torch.dtype
) -> tuple[Any, ...]:
    """Arguments of a call; ``others`` may set dtypes of the residual and of the parameters."""
    owned = others.get("weight", dtype)
    dtypes = (dtype, others.get("residual", dtype))[: 1 + norm.residual]
    rows = [draw(*shape, device=device, dtype=d, seed=i) for i, d in enumerate(dtypes)]
    names = range(2, 3 + norm.centered)
    parameters = (draw(shape[-1], device=device, dtype=owned, seed=i) for i in names)
    return (*rows, shape[-1:], *parameters)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    require_like_plain(NORMS[name].op, arguments(NORMS[name], shape, dtype, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NORMS)
def test_options_of_norms(name: str, device: str) -> None:
    norm = NORMS[name]
    owned = {"weight": torch.float32}
    for dtype in (torch.float16, torch.bfloat16):
        args = arguments(norm, (6, 264), dtype, device, **owned)
        require_like_plain(norm.op, args, offset=1.0, round="input", eps=1e-3)
        first = 1 + norm.residual
        require_like_plain(norm.op, (*args[:first], [264]))
        if norm.centered:
            require_like_plain(norm.op, (*args[:first], 264, None, args[-1]))
        if norm.residual:
            mixed = arguments(norm, (6, 264), dtype, device, residual=torch.float32)
            require_like_plain(norm.op, mixed)
            swapped = arguments(norm, (6, 264), torch.float32, device, residual=dtype)
            require_like_plain(norm.op, swapped)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NORMS)
def test_strides_of_rows(name: str, device: str) -> None:
    norm = NORMS[name]
    whole = draw(40, 700, device=device, dtype=torch.bfloat16)
    for x in (whole[:, 8:264], whole[:, 3:300], whole[::2], whole.T, whole[:1].expand(40, 700)):
        rows = [x] * (1 + norm.residual)
        found = parts(norm.op.quantizing(*rows, x.shape[-1]))[0]
        require_equal(found, parts(norm.op.plain(*rows, x.shape[-1]))[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_is_visible_and_alone(bad: float, device: str) -> None:
    x = draw(5, 4096, device=device, dtype=torch.bfloat16)
    weight = torch.ones(4096, device=device, dtype=torch.bfloat16)
    weight[200] = bad
    x[3, 5] = bad
    found = torchkiln.rms_norm_fp8(x, 4096, weight)
    require_equal(found, torchkiln.rms_norm(x, 4096, weight))
    isnan = torchkiln.dequantize(found).isnan()
    assert isnan[:3].sum() == 3
    assert isnan[:, 200].all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [1000, 2048])
def test_zeros_have_the_signs_of_the_norm(columns: int, device: str) -> None:
    x = draw(5, columns, device=device, dtype=torch.bfloat16)
    weight = torch.ones(columns, device=device, dtype=torch.bfloat16)
    weight[::3] = -0.0
    weight[1::3] = 0.0
    found = torchkiln.rms_norm_fp8(x, columns, weight)
    signs = torchkiln.rms_norm(x, columns, weight).signbit()
    assert torch.equal(found.data.view(torch.uint8) >= 128, signs)


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_into_a_product(name: str, dtype: torch.dtype, device: str) -> None:
    """Gradients agree with float64, where quantisation passes them on unchanged."""
    norm = NORMS[name]
    args = arguments(norm, (48, 384), dtype, device)
    inputs = [a.requires_grad_() for a in args if isinstance(a, Tensor)]
    weight = (draw(160, 384, device=device, dtype=dtype) / 384**0.5).requires_grad_()
    grad = draw(48, 160, device=device, dtype=dtype, seed=5)
    y = torchkiln.linear_fp8(parts(norm.op.quantizing(*args))[0], weight)
    assert y.dtype == dtype
    found = torch.autograd.grad(y, [*inputs, weight], grad)

    wide = [a.detach().double().requires_grad_() for a in inputs]
    z = wide[0] + wide[1] if norm.residual else wide[0]
    shape, parameters = args[1 + norm.residual], wide[1 + norm.residual :]
    torchs: Any = F.layer_norm if norm.centered else F.rms_norm
    eps = 1e-5 if norm.centered else torch.finfo(torch.float32).eps
    exact = torchs(z, shape, *parameters, eps=eps)
    normed = quantize(parts(norm.op.plain(*args))[0].detach())
    both = (normed, torchkiln.transpose_quantized(normed, square=True))
    rounded, turned = (torchkiln.dequantize(q, torch.float64) for q in both)
    weights = torchkiln.dequantize(torchkiln.quantize_weight(weight.detach()), torch.float64)
    rows, columns = (torchkiln.dequantize(q, torch.float64) for q in torchkiln.quantize_both(grad))
    expected = [
        rounded @ weights.T,
        *torch.autograd.grad(exact, wide, rows @ weights),
        columns @ turned.T,
    ]
    for one, truth in zip((y, *found), expected, strict=True):
        # y and gradients are rounded; each product has an error of at most 2^-12.
        error = (one.double() - truth).norm() / truth.norm()
        assert error <= 2 * torch.finfo(dtype).eps + 2.0**-12 * one.is_cuda + 1e-6


def test_one_result_for_several_products() -> None:
    x = draw(40, 256, device="cpu", dtype=torch.bfloat16).requires_grad_()
    weight = draw(384, 256, device="cpu", dtype=torch.float32)
    shared = torchkiln.rms_norm_fp8(x, 256)
    both = [torchkiln.linear_fp8(shared, half) for half in (weight[:128], weight[128:])]
    (of_both,) = torch.autograd.grad(torch.cat(both, -1).sum(), x)
    at_once = torchkiln.linear_fp8(torchkiln.rms_norm_fp8(x, 256), weight)
    (expected,) = torch.autograd.grad(at_once.sum(), x)
    assert (of_both - expected).norm() <= 2 * torch.finfo(torch.bfloat16).eps * expected.norm()


def test_the_carrier_takes_no_memory() -> None:
    with torch.no_grad():
        found = torchkiln.rms_norm_fp8(torch.randn(64, 512), 512)
    assert found.source is not None
    assert found.source.untyped_storage().nbytes() == 4
    half = torchkiln.rms_norm_fp8(torch.randn(64, 512, dtype=torch.float16), 512)
    assert torchkiln.linear_fp8(half, torch.randn(8, 512)).dtype == torch.float16


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_norms(name: str, dynamic: bool) -> None:
    norm = NORMS[name]
    weight = draw(64, 200, device="cpu", dtype=torch.float32)

    def call(*args: Any) -> Tensor:
        result = parts(norm.op.quantizing(*args))
        y = torchkiln.linear_fp8(result[0], weight)
        return torch.cat([y, *result[1:]], -1)

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 9):
        args = arguments(norm, (rows, 200), torch.float32, "cpu")
        inputs = [a.requires_grad_() for a in args if isinstance(a, Tensor)]
        results = [function(*args) for function in (compiled, call)]
        assert torch.equal(*results)
        grads = [torch.autograd.grad(y.square().sum(), inputs) for y in results]
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", NORMS)
def test_op_checks(name: str) -> None:
    norm = NORMS[name]
    args = arguments(norm, (3, 300), torch.bfloat16, "cpu")
    real, meta = norm.overload(*args), norm.overload(*(to_meta(a) for a in args))
    for one, other in zip(real, meta, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    # opcheck's other tests multiply results, and torch has no product of E4M3 tensors.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(norm.overload, args, test_utils=tests)


@pytest.mark.parametrize("name", NORMS)
def test_second_derivatives_of_norms(name: str) -> None:
    norm = NORMS[name]
    args = arguments(norm, (3, 40), torch.float32, "cpu")
    x = args[0].requires_grad_()
    grad = draw(3, 40, device="cpu", dtype=torch.float32, seed=4)
    carriers = parts(norm.op.quantizing(*args))[0].source, parts(norm.op.plain(*args))[0]
    firsts = [torch.autograd.grad(y, x, grad, create_graph=True)[0] for y in carriers]
    one, other = (torch.autograd.grad(first.square().sum(), x)[0] for first in firsts)
    assert other.norm() > 0
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", NORMS)
def test_errors_of_norms(name: str) -> None:
    norm = NORMS[name]
    args = arguments(norm, (4, 130), torch.float32, "cpu")
    op = norm.op.quantizing.__name__
    with pytest.raises(RuntimeError, match=rf"{op}: x: got dtype float64, expected one of float32"):
        norm.op.quantizing(*(a.double() if isinstance(a, Tensor) else a for a in args))
    first = 1 + norm.residual
    with pytest.raises(
        RuntimeError, match=rf"{op}: normalized_shape: got \[4, 130\], expected one"
    ):
        norm.op.quantizing(*args[:first], (4, 130))
    with pytest.raises(RuntimeError, match=rf"{op}: weight: got shape \[130\], expected \[129\]"):
        norm.op.quantizing(*(x[:, 1:] for x in args[:first]), 129, args[first + 1])
    with pytest.raises(NotImplementedError, match=rf"{op}: got a transform of torch\.func"):
        torch.func.grad(lambda x: norm.overload(x, *args[1:])[1].sum())(args[0])
