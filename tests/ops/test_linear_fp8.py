"""linear_fp8 and its module: products, gradients, saved tensors, refused arguments."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import cast

import pytest
import torch
from producers import HAS_PRODUCT, PRODUCT_DEVICES
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import torchkiln
from torchkiln import linear_fp8, quantize, quantize_both, quantize_weight

NEEDS_PRODUCT = pytest.mark.skipif(not HAS_PRODUCT, reason="needs a GPU of compute capability 9.0")
# Tokens, input and output features: multiples of 128, multiples of 16, and sizes to be padded.
SIZES = ((256, 384, 128), (48, 160, 272), (33, 130, 65), (1, 7, 3))


def values(x: Tensor) -> Tensor:
    """x, quantised along its rows and dequantised to float64."""
    return torchkiln.dequantize(quantize(x), torch.float64)


def columns(x: Tensor, *, square: bool = False) -> Tensor:
    """A matrix, quantised along its columns and dequantised to float64."""
    return torchkiln.dequantize(quantize_both(x, square)[1], torch.float64).T


def weight_values(weight: Tensor) -> Tensor:
    """A weight, quantised in squares and dequantised to float64."""
    return torchkiln.dequantize(quantize_weight(weight), torch.float64)


def operands(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and an incoming gradient; the weight is float32."""
    tokens, inside, outside = sizes
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, grad = normal(tokens, inside).to(dtype), normal(tokens, outside).to(dtype)
    weight, bias = normal(outside, inside) / inside**0.5, normal(outside).to(dtype)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), grad


def require_product(
    found: Tensor, left: Tensor, right: Tensor, shift: Tensor | None = None
) -> None:
    """Require left @ right.T + shift in float64, up to rounding and float32 sums."""
    exact, terms = left @ right.T, left.abs() @ right.abs().T
    if shift is not None:
        exact, terms = exact + shift, terms + shift.abs()
    # Tensor cores keep about 14 bits when they add 128 products.
    sums = 2.0**-12 if found.is_cuda else left.shape[-1] * 2.0**-24
    allowed = torch.finfo(found.dtype).eps * exact.abs() + sums * terms
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients(sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    x, weight, bias, grad = operands(sizes, dtype, device)
    y = linear_fp8(x, weight, bias)
    y.backward(grad)
    assert y.dtype == dtype
    assert y.is_contiguous()
    require_product(y, values(x), weight_values(weight), bias.detach().double())
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    assert weight.grad.dtype == torch.float32
    require_product(x.grad, values(grad), weight_values(weight).T)
    require_product(weight.grad, columns(grad).T, columns(x.detach(), square=True).T)
    assert_close(bias.grad, torchkiln.sum(grad, 0), rtol=0, atol=0)
    with torch.no_grad():
        assert torch.equal(linear_fp8(x, weight, bias), y)


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
def test_leading_dimensions(device: str) -> None:
    x, weight, bias, grad = operands((64, 256, 128), torch.bfloat16, device)
    flat = linear_fp8(x, weight, bias)
    batch = x.detach().view(2, 4, 8, 256).requires_grad_()
    y = linear_fp8(batch, weight, bias)
    assert torch.equal(y.view(64, 128), flat)
    first = torch.autograd.grad(flat, (x, weight, bias), grad)
    second = torch.autograd.grad(y, (batch, weight, bias), grad.view(2, 4, 8, 128))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two.view_as(one))
    assert torch.equal(linear_fp8(x[0], weight, bias), linear_fp8(x[:1], weight, bias)[0])


def shifted(tensor: Tensor, elements: int) -> Tensor:
    """A copy at this element of new memory, with the same strides and zeros between rows."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize + elements
    memory = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), elements).copy_(tensor.detach())


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_PRODUCT])]
)
@pytest.mark.parametrize("elements", [1, 2, 4, 8])
def test_operands_may_begin_anywhere(elements: int, device: str) -> None:
    """Alignment changes no bit, of data, scales or bias, with the weight in both orders."""
    x, weight, bias, grad = operands((48, 256, 128), torch.bfloat16, device)
    rows, prepared = quantize(x), quantize_weight(weight)
    y = linear_fp8(rows, weight, bias, quantized=prepared)
    expected = torch.autograd.grad(y, (x, weight, bias), grad)

    apart = torch.stack([bias, bias], 1).detach()[:, 0].requires_grad_()  # a stride of 2
    assert torch.equal(linear_fp8(rows, weight, apart, quantized=prepared), y)
    rows = rows._replace(data=shifted(rows.data, elements), scale=shifted(rows.scale, elements))
    prepared = torchkiln.QuantizedWeight(*(shifted(part, elements) for part in prepared))
    bias = shifted(bias, elements).requires_grad_()
    z = linear_fp8(rows, weight, bias, quantized=prepared)
    assert z.dtype == torch.bfloat16
    assert torch.equal(z, y)
    found = torch.autograd.grad(z, (x, weight, bias), grad)
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
def test_one_quantised_input_for_several_layers(device: str) -> None:
    x, weight, _, grad = operands((48, 256, 128), torch.bfloat16, device)
    other = (weight * 3).detach().requires_grad_()
    shared = quantize(x)
    y, z = linear_fp8(shared, weight), linear_fp8(shared, other)
    assert torch.equal(y, linear_fp8(x, weight))
    assert y.dtype == x.dtype
    found = torch.autograd.grad((y, z), (x, weight, other), (grad, grad))
    alone = torch.autograd.grad(linear_fp8(x, weight), (x, weight), grad)
    more = torch.autograd.grad(linear_fp8(x, other), (x, other), grad)
    assert torch.equal(found[0], alone[0] + more[0])
    # x is quantised along its columns from its quantised rows.
    transposed = torchkiln.transpose_quantized(shared, square=True)
    right = torchkiln.dequantize(transposed, torch.float64)
    require_product(found[1], columns(grad).T, right)
    with torch.no_grad():  # without a source, the weight decides the dtype
        assert linear_fp8(quantize(x), weight).dtype == torch.float32


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
def test_a_prepared_weight_changes_nothing(device: str) -> None:
    x, weight, bias, grad = operands((33, 130, 65), torch.bfloat16, device)
    prepared = quantize_weight(weight)
    y, z = linear_fp8(x, weight, bias), linear_fp8(x, weight, bias, quantized=prepared)
    assert torch.equal(y, z)
    first = torch.autograd.grad(y, (x, weight, bias), grad)
    second = torch.autograd.grad(z, (x, weight, bias), grad)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)


def test_only_float8_is_kept() -> None:
    x, weight, bias, _ = operands((64, 256, 128), torch.float32, "cpu")
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_fp8(x, weight, bias)
    assert sum(t.nbytes for t in kept) < 1.1 * (x.numel() + weight.numel())


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_the_gradients_asked_for(wanted: tuple[int, ...]) -> None:
    inputs = operands((33, 130, 65), torch.float32, "cpu")
    grad = inputs[3]
    every = torch.autograd.grad(linear_fp8(*inputs[:3]), inputs[:3], grad)
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs[:3])]
    some = torch.autograd.grad(linear_fp8(*leaves), [leaves[i] for i in wanted], grad)
    for i, found in zip(wanted, some, strict=True):
        assert torch.equal(found, every[i])


@pytest.mark.parametrize("shape", [(0, 130), (5, 0), (2, 0, 130)])
def test_no_elements(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight, bias = torch.randn(9, shape[-1], requires_grad=True), torch.randn(9)
    y = linear_fp8(x, weight, bias)
    y.sum().backward()
    assert torch.equal(y, bias.expand_as(y))
    assert x.grad is not None
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_row_with_an_outlier_spoils_its_block_only() -> None:
    x, weight, _, _ = operands((256, 512, 256), torch.float32, "cpu")
    x, weight = x.detach(), weight.detach()
    exact = x.double() @ weight.double().T
    usual = (linear_fp8(x, weight) - exact).norm() / exact.norm()
    x[7, 300] = 1e4
    exact = x.double() @ weight.double().T
    error = (linear_fp8(x, weight) - exact).norm(dim=1) / exact.norm(dim=1)
    assert usual < 0.05
    assert error.max() < 0.05


def test_what_is_refused() -> None:
    x, weight, bias, _ = operands((33, 130, 65), torch.float32, "cpu")
    y = linear_fp8(x, weight, bias)
    with pytest.raises(NotImplementedError, match="linear_fp8: got a second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"linear_fp8: got a transform of torch\.func"):
        torch.func.grad(lambda one: linear_fp8(one, weight).sum())(x)
    with pytest.raises(RuntimeError, match="weight: got size 130 in dimension 1 of shape"):
        linear_fp8(x[:, :129], weight)
    with pytest.raises(RuntimeError, match="weight: got dtype float64, expected one of"):
        linear_fp8(x, weight.double())
    with pytest.raises(RuntimeError, match=r"bias: got shape \[64\], expected \[65\]"):
        linear_fp8(x, weight, bias[:64])
    with pytest.raises(RuntimeError, match="quantized: got float8_e4m3fn"):
        linear_fp8(x, weight, quantized=quantize_weight(weight[:64]))


def test_autocast_casts_the_input_alone() -> None:
    x, weight, _, _ = operands((32, 256, 128), torch.float32, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        y = linear_fp8(x, weight)
    assert torch.equal(y, linear_fp8(x.bfloat16(), weight))


def layer(inside: int, outside: int, device: str = "cpu") -> torchkiln.nn.LinearFP8:
    """A layer with the same parameters in each call."""
    torch.manual_seed(3)
    return torchkiln.nn.LinearFP8(inside, outside, device=device)


def test_module_is_a_linear() -> None:
    found = layer(130, 65)
    plain = nn.Linear(130, 65)
    found.load_state_dict(plain.state_dict())
    assert isinstance(found, nn.Linear)
    x = torch.randn(5, 130)
    y = found(x)
    assert torch.equal(y, linear_fp8(x, plain.weight, plain.bias))
    saved = io.BytesIO()
    torch.save(found, saved)
    saved.seek(0)
    for other in (copy.deepcopy(found), torch.load(saved, weights_only=False)):
        assert "_cache" not in vars(other)
        assert torch.equal(other(x), y)


def adds(weight: Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def writes_data_and_steps(weight: Tensor) -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()
    weight.data.add_(1)


def loads(weight: Tensor) -> None:
    other = nn.ParameterList([cast("nn.Parameter", weight)])
    other.load_state_dict({"0": weight.detach() + 1})


@pytest.mark.parametrize("change", [adds, writes_data_and_steps, loads])
def test_weight_is_quantised_once_per_version(
    change: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def counted(weight: Tensor) -> torchkiln.QuantizedWeight:
        nonlocal count
        count += 1
        return quantize_weight(weight)

    monkeypatch.setattr("torchkiln.nn.quantize.quantize_weight", counted)
    monkeypatch.setattr("torchkiln.nn.quantize.has_group", lambda: False)
    found, x = layer(256, 128), torch.randn(16, 256)
    for _ in range(3):  # three micro-batches
        found(x).sum().backward()
    assert count == 1
    change(found.weight)
    assert torch.equal(found(x), linear_fp8(x, found.weight, found.bias))
    assert count == 2


def test_another_weight_is_quantised() -> None:
    """A new parameter is quantised though its version, and often its address, is the old one's."""
    found, x = layer(256, 128), torch.randn(16, 256)
    for _ in range(8):
        found.weight = None  # type: ignore[assignment]
        found.weight = nn.Parameter(torch.randn(128, 256))
        assert torch.equal(found(x), linear_fp8(x, found.weight, found.bias))


def test_parts_of_another_weight_are_refused() -> None:
    weight, other = torch.randn(128, 256), quantize_weight(torch.randn(128, 384))
    own = quantize_weight(weight)
    for name in ("scale", "transposed", "transposed_scale"):
        mixed = own._replace(**{name: getattr(other, name)})
        with pytest.raises(RuntimeError, match=r"quantized: got .*, expected"):
            linear_fp8(torch.randn(4, 256), weight, quantized=mixed)


def test_training_after_inference_mode() -> None:
    found, x = layer(256, 128), torch.randn(16, 256, requires_grad=True)
    with torch.inference_mode():
        found(x)
    found(x).sum().backward()
    assert x.grad is not None


def test_writes_of_fsdp_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a process group each call quantises: FSDP2 writes a weight without a new version."""
    found, x = layer(256, 128), torch.randn(16, 256)
    found(x)
    monkeypatch.setattr("torchkiln.nn.quantize.has_group", lambda: True)
    found.weight.data.neg_()
    assert torch.equal(found(x), linear_fp8(x, found.weight, found.bias))


def test_compiled_sees_new_weights() -> None:
    found, x = layer(256, 128), torch.randn(16, 256)
    compiled = torch.compile(found, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        y = compiled(x)
        assert torch.equal(y, found(x))
        grads = torch.autograd.grad(y.square().sum(), list(found.parameters()))
        eager = torch.autograd.grad(found(x).square().sum(), list(found.parameters()))
        for one, two in zip(grads, eager, strict=True):
            assert torch.equal(one, two)
        adds(found.weight)


def test_a_call_with_another_weight_before_a_step() -> None:
    found, x = layer(256, 128), torch.randn(16, 256)
    found(x)
    torch.func.functional_call(found, {"weight": torch.zeros(128, 256)}, (x,))
    torch.optim.SGD(found.parameters(), 0.5).step()
    found.weight.data.neg_()
    assert torch.equal(found(x), linear_fp8(x, found.weight, found.bias))


def test_a_compiled_optimizer() -> None:
    """A compiled step is compiled once, and the weight is quantised again after it."""
    found, x = layer(256, 128), torch.randn(16, 256)
    found(x).sum().backward()
    optimizer = torch.optim.SGD(found.parameters(), 0.5)
    folded = torchkiln.nn.ConvBNAct2d(8, 6, 3).eval()
    with torch.no_grad():
        folded(torch.randn(1, 8, 5, 5))  # a second hook, as compiled hooks have guards
    torch.compiler.reset()
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(3):
        with torch._dynamo.config.patch(error_on_recompile=True):
            step()
        assert torch.equal(found(x), linear_fp8(x, found.weight, found.bias))


@pytest.mark.parametrize("is_frozen_before", [False, True])
def test_weights_copied_from_others_after_a_step(*, is_frozen_before: bool) -> None:
    """Weights copied from an optimizer's parameters, as in mixed precision, are quantised again."""
    found, x = layer(256, 128), torch.randn(16, 256)
    found.requires_grad_(not is_frozen_before)
    found(x)
    found.requires_grad_()
    found(x)
    other = nn.Parameter(found.weight.detach().double())
    other.grad = torch.ones_like(other)
    torch.optim.SGD([other], 0.5).step()
    found.weight.data.copy_(other)
    assert torch.equal(found(x), linear_fp8(x, found.weight, found.bias))


def test_exported_with_a_quantised_result() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(130, 65).requires_grad_(requires_grad=False)

        def forward(self, x: Tensor) -> tuple[torchkiln.Quantized, Tensor]:
            shared = quantize(x)
            return shared, self.layer(shared)

    module, x = Both(), torch.randn(5, 130)
    saved = io.BytesIO()
    torch.export.save(torch.export.export(module, (x,)), saved)
    saved.seek(0)
    shared, y = torch.export.load(saved).module()(x)
    assert isinstance(shared, torchkiln.Quantized)
    assert torch.equal(y, module(x)[1])


def test_checkpointed() -> None:
    found, x = layer(256, 128), torch.randn(16, 256, requires_grad=True)
    y, z = found(x), checkpoint(found, x, use_reentrant=False)
    assert torch.equal(y, z)
    first = torch.autograd.grad(y.square().sum(), [x, *found.parameters()])
    second = torch.autograd.grad(z.square().sum(), [x, *found.parameters()])
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)


@NEEDS_PRODUCT
def test_graph_capture_quantises_the_weight_in_the_graph() -> None:
    found = layer(256, 128, device="cuda")
    x = torch.randn(32, 256, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            found(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = found(x)
        found.weight.mul_(2)
        graph.replay()
        assert torch.equal(y, found(x))


@pytest.mark.skipif(not torch.cuda.is_available() or HAS_PRODUCT, reason="needs another GPU")
def test_other_gpus_say_what_is_missing() -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match="expected"):
        layer(256, 128, device="cuda")(torch.randn(32, 256, device="cuda"))
