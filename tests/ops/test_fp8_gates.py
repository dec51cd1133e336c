"""Gates that write E4M3, and the gated layer, whose gradients enter products in E4M3."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from producers import (
    DEVICES,
    DTYPES,
    PRODUCT_DEVICES,
    Op,
    carrier,
    draw,
    require_equal,
    require_like_plain,
    to_meta,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torchkiln
from torchkiln import Quantized


class Gate(NamedTuple):
    """A gate with its E4M3 form, and the activation."""

    op: Op
    act: Any


GATES = {
    "swiglu": Gate(Op(torchkiln.swiglu, torchkiln.swiglu_fp8), "silu"),
    "geglu": Gate(Op(torchkiln.geglu, torchkiln.geglu_fp8), "gelu"),
    "geglu_tanh": Gate(
        Op(
            partial(torchkiln.geglu, approximate="tanh"),
            partial(torchkiln.geglu_fp8, approximate="tanh"),
        ),
        "gelu_tanh",
    ),
}
# Packed rows read as single elements or vectors, of whole blocks and of parts of blocks.
GATE_SHAPES = (
    *((3, 2), (16, 16), (7, 74), (32, 272), (2, 64, 512), (130, 768), (144, 768)),
    *((0, 4), (4, 0)),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GATE_SHAPES)
@pytest.mark.parametrize("name", GATES)
def test_gates(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    packed = draw(*shape, device=device, dtype=dtype)
    require_like_plain(GATES[name].op, (packed,))
    halves = [half.contiguous() for half in packed.detach().chunk(2, -1)]
    require_like_plain(GATES[name].op, tuple(halves))


@pytest.mark.parametrize("device", DEVICES)
def test_layouts_and_dtypes_of_gates(device: str) -> None:
    gate, up = (draw(48, 300, device=device, dtype=torch.bfloat16, seed=i) for i in (0, 1))
    for view in (slice(8, 264), slice(3, 300), slice(None, None, 2)):
        require_like_plain(GATES["swiglu"].op, (gate[:, view].detach(), up[:, view].detach()))
    require_like_plain(GATES["swiglu"].op, (gate.T.detach(), up.T.detach()))
    require_like_plain(GATES["swiglu"].op, (gate.detach(), up.float()))
    gate[5, 7] = math.inf
    up[9, 290] = math.nan
    require_equal(torchkiln.swiglu_fp8(gate, up), torchkiln.swiglu(gate, up))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GATE_SHAPES)
@pytest.mark.parametrize("name", GATES)
def test_gradients_of_gates_in_both_orientations(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    act = GATES[name].act
    packed = draw(*shape, device=device, dtype=dtype)
    grad = draw(*shape[:-1], shape[-1] // 2, device=device, dtype=dtype, seed=3)
    if grad.numel():
        grad.view(-1)[-1] = math.inf
    found = torch.ops.torchkiln._gated_fp8_backward(grad, packed, act)
    plain, _ = torch.ops.torchkiln._gated_backward(grad, packed, None, act)
    matrix = plain.reshape(math.prod(shape[:-1]), shape[-1])
    require_equal(Quantized(found[0], found[1], plain), plain)
    require_equal(Quantized(found[2], found[3], matrix.T), matrix.T)


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("is_quantized", [False, True])
def test_gated_linear_is_its_parts(name: str, device: str, *, is_quantized: bool) -> None:
    gate = GATES[name]
    x = draw(3, 32, 256, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (draw(384, 256, device=device, dtype=torch.float32) / 16).requires_grad_()
    grad = draw(3, 32, 192, device=device, dtype=torch.bfloat16, seed=1)

    def given() -> Tensor | Quantized:
        return torchkiln.rms_norm_fp8(x, 256) if is_quantized else x

    found = torchkiln.gated_linear_fp8(given(), weight, gate.act)
    packed = torchkiln.linear_fp8(given(), weight)
    require_equal(found, gate.op.plain(packed).detach())
    parts_of = gate.op.quantizing(packed)
    pairs = [torch.autograd.grad(carrier(q), (x, weight), grad) for q in (found, parts_of)]
    for one, other in zip(*pairs, strict=True):
        if device == "cpu":
            assert torch.equal(one, other)
        else:
            assert (one - other).norm() <= 2.0**-8 * other.norm()
    frozen = torchkiln.gated_linear_fp8(given(), weight.detach(), gate.act)
    (alone,) = torch.autograd.grad(carrier(frozen), x, grad)
    assert (alone - pairs[1][0]).norm() <= 2.0**-8 * pairs[1][0].norm()
    prepared = torchkiln.quantize_weight(weight.detach())
    again = torchkiln.gated_linear_fp8(given(), weight, gate.act, quantized=prepared)
    assert torch.equal(again.data.view(torch.uint8), found.data.view(torch.uint8))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_feed_forward(dynamic: bool) -> None:
    first, second = (draw(*s, device="cpu", dtype=torch.float32) / 16 for s in ((96, 64), (64, 48)))
    first.requires_grad_()

    def layer(x: Tensor) -> Tensor:
        hidden = torchkiln.gated_linear_fp8(torchkiln.rms_norm_fp8(x, 64), first)
        gate = torchkiln.swiglu_fp8(torchkiln.linear_fp8(hidden, second))
        return torchkiln.linear_fp8(gate, second[:, :32])

    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 9):
        x = draw(rows, 64, device="cpu", dtype=torch.float32).requires_grad_()
        results = [function(x) for function in (compiled, layer)]
        assert torch.equal(*results)
        grads = [torch.autograd.grad(y.square().sum(), (x, first)) for y in results]
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)


def test_op_checks_of_gates() -> None:
    packed = draw(3, 300, device="cpu", dtype=torch.bfloat16).requires_grad_()
    weight = draw(40, 300, device="cpu", dtype=torch.float32).requires_grad_()
    grad = draw(3, 150, device="cpu", dtype=torch.bfloat16)
    ops = torch.ops.torchkiln
    # opcheck's other tests multiply results, and torch has no product of E4M3 tensors.
    tests = ("test_autograd_registration", "test_faketensor")
    for op, args in (
        (ops._gated_fp8.default, (packed, None, "silu")),
        (ops._gated_fp8_backward.default, (grad, packed, "silu")),
        (ops.gated_linear_fp8.default, (packed, weight)),
    ):
        real, meta = op(*args), op(*map(to_meta, args))
        for one, other in zip(real, meta, strict=True):
            assert one.shape == other.shape
            assert (one.stride(), one.dtype) == (other.stride(), other.dtype)
        torch.library.opcheck(op, args, test_utils=tests)


def test_errors_of_gates() -> None:
    x = draw(4, 130, device="cpu", dtype=torch.float32).requires_grad_()
    weight = draw(6, 130, device="cpu", dtype=torch.float32)
    with pytest.raises(RuntimeError, match="swiglu_fp8: gate: got dtype float64, expected one of"):
        torchkiln.swiglu_fp8(x.double())
    with pytest.raises(RuntimeError, match="geglu_fp8: gate: got a last dimension of size 129"):
        torchkiln.geglu_fp8(x[:, 1:])
    with pytest.raises(
        RuntimeError, match="gated_linear_fp8: weight: got 5 rows, expected an even"
    ):
        torchkiln.gated_linear_fp8(x, weight[:5])
    with pytest.raises(RuntimeError, match="gated_linear_fp8: weight: got size 129 in dimension 1"):
        torchkiln.gated_linear_fp8(x, weight[:, 1:])
    source = carrier(torchkiln.gated_linear_fp8(x, weight))
    with pytest.raises(NotImplementedError, match="gated_linear_fp8: got a second derivative"):
        torch.autograd.grad(source.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"swiglu_fp8: got a transform of torch\.func"):
        torch.func.grad(lambda x: torchkiln.swiglu_fp8(x).scale.sum())(x)


@pytest.mark.parametrize("name", ["norm", "gate"])
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_rows_of_a_dtensor(name: str) -> None:
    from torch.distributed._local_tensor import LocalTensorMode  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415

    from torchkiln.testing.contract.sharding import process_group  # noqa: PLC0415

    def of(x: Any) -> tuple[Any, ...]:
        if name == "gate":
            return torchkiln.swiglu_fp8(x), None, x[..., :150]
        found, total = torchkiln.add_rms_norm_fp8(x, x.detach() + 1, (300,))
        return found, total, x

    x = draw(6, 300, device="cpu", dtype=torch.float32).requires_grad_()
    expected, total, grad = of(x)
    (of_x,) = torch.autograd.grad(carrier(expected), x, grad.detach())
    with process_group(2), LocalTensorMode(2):
        mesh = init_device_mesh("cpu", (2,))
        shard: Any = distribute_tensor(x.detach(), mesh, [Shard(0)], src_data_rank=None)
        found, sum_found, grad = of(shard.requires_grad_())
        (of_shard,) = torch.autograd.grad(found.source, shard, grad.detach())
        pairs = [(found.data, expected.data), (found.scale, expected.scale), (of_shard, of_x)]
        pairs += [] if total is None else [(sum_found, total)]
        for one, other in pairs:
            assert one.placements == (Shard(0),)
            assert torch.equal(one.detach().full_tensor().reconcile().float(), other.float())


def test_checkpointed_layer() -> None:
    first, second = (draw(*s, device="cpu", dtype=torch.float32) / 16 for s in ((96, 64), (64, 48)))
    x = draw(9, 64, device="cpu", dtype=torch.float32).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        hidden = torchkiln.gated_linear_fp8(torchkiln.rms_norm_fp8(x, 64), first)
        return torchkiln.linear_fp8(hidden, second)

    grads = [
        torch.autograd.grad(y.square().sum(), x)[0]
        for y in (layer(x), checkpoint(layer, x, use_reentrant=False))
    ]
    assert torch.equal(*grads)
