"""linear and matmul beyond the contract."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchkiln
from torchkiln.ops.matmul import matmul
from torchkiln.testing.specs.activation import FORMULAS
from torchkiln.typing import Activation


def saved_bytes(function: object, *args: object) -> int:
    """Bytes that are saved for backward in addition to the arguments."""
    kept: dict[int, int] = {}
    given = {a.data_ptr() for a in args if isinstance(a, torch.Tensor)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in given:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.itemsize
        return tensor

    assert callable(function)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*args)
    kept.pop(out.data_ptr(), None)
    return sum(kept.values())


@pytest.mark.parametrize(("act", "outputs"), [("none", 0), ("relu", 0), ("gelu", 1), ("tanh", 1)])
def test_the_preactivation_is_kept_only_where_it_is_needed(
    device: torch.device, act: Activation, outputs: int
) -> None:
    x = torch.randn(16, 8, device=device, requires_grad=True)
    weight = torch.randn(32, 8, device=device, requires_grad=True)
    bias = torch.randn(32, device=device, requires_grad=True)
    assert saved_bytes(partial(torchkiln.linear, act=act), x, weight, bias) == outputs * 16 * 32 * 4


def test_relu_beside_a_residual_is_not_judged_by_the_sum(device: torch.device) -> None:
    """With a residual, the gradient of relu depends on the product, not on the sign of the sum."""
    x = torch.eye(2, device=device, requires_grad=True)
    weight = torch.tensor([[1.0, -1.0]], device=device)
    residual = torch.tensor([[-5.0], [5.0]], device=device)
    torchkiln.linear(x, weight, act="relu", residual=residual).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, -1.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ["gelu_tanh", "silu", "tanh", "square"])
def test_a_float32_bias_beside_half_precision(dtype: torch.dtype, act: Activation) -> None:
    """On the CPU a float32 bias is added to the rounded product, and the sum is rounded once.

    The gradient of the bias is as exact as the one that torch's ops compute in float32.
    """
    torch.manual_seed(2)
    x, weight = torch.randn(4096, 64).to(dtype), torch.randn(32, 64).div(8).to(dtype)
    bias, grad = torch.randn(32, requires_grad=True), torch.randn(4096, 32).to(dtype)

    def gradient(out: torch.Tensor, again: bool = False) -> torch.Tensor:
        return torch.autograd.grad(out, bias, grad.to(out.dtype), create_graph=again)[0].double()

    z = x.double() @ weight.double().t() + bias.double()
    truth = gradient(FORMULAS[act].value(z))
    recorded = gradient(torchkiln.linear(x, weight, bias, act=act)) - truth
    by_torch = gradient(torchkiln.linear(x, weight, bias, act=act), again=True) - truth
    assert recorded.norm() <= 1.05 * by_torch.norm()


def test_matmul_is_torch_matmul(device: torch.device) -> None:
    a = torch.randn(3, 1, 4, 5, device=device)
    b = torch.randn(2, 5, 6, device=device)
    out = matmul(a, b)
    assert out.is_contiguous()
    torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shapes", [((50, 3), (3, 4)), ((50, 3), (3,)), ((3,), (3, 4))])
def test_a_gradient_has_contiguous_columns_if_its_matrix_has(
    device: torch.device, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    """Gradients have the strides of torch.matmul's, whose backward computes the same products."""
    made = [torch.randn(shape[::-1], device=device, dtype=dtype).t() for shape in shapes]
    made = [tensor.requires_grad_() for tensor in made]
    grad = torch.randn_like(torch.matmul(*made))
    found = torch.autograd.grad(matmul(*made), made, grad)
    for one, other, tensor in zip(
        found, torch.autograd.grad(torch.matmul(*made), made, grad), made, strict=True
    ):
        assert one.stride() == tensor.stride()
        torch.testing.assert_close(one, other)


def test_the_module_is_torchs(device: torch.device) -> None:
    torch.manual_seed(3)
    ours = torchkiln.nn.Linear(5, 7, act="silu", device=device)
    torch.manual_seed(3)
    theirs = nn.Linear(5, 7, device=device)
    assert isinstance(ours, nn.Linear)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 5, device=device)
    residual = torch.randn(2, 3, 7, device=device)
    torch.testing.assert_close(ours(x), F.silu(theirs(x)))
    torch.testing.assert_close(ours(x, residual), F.silu(theirs(x)) + residual)
    text = "Linear(in_features=5, out_features=7, bias=True, act='silu', scale=1.0)"
    assert repr(ours) == text


def test_runs_give_the_same_bits(device: torch.device) -> None:
    x = torch.randn(129, 257, device=device, requires_grad=True)
    weight = torch.randn(65, 257, device=device, requires_grad=True)
    bias = torch.randn(65, device=device, requires_grad=True)
    runs = []
    for _ in range(3):
        out = torchkiln.linear(x, weight, bias, act="gelu")
        runs.append((out, *torch.autograd.grad(out.sum(), (x, weight, bias))))
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))


def test_no_bias(device: torch.device) -> None:
    layer = torchkiln.nn.Linear(5, 7, bias=False, scale=0.5, device=device)
    x = torch.randn(3, 5, device=device)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight) * 0.5)


# cuBLAS itself fuses no activation, or relu; these cases use it.
FUSED = [
    (act, has_residual)
    for act in FORMULAS
    for has_residual in (False, True)
    if has_residual or act not in ("none", "relu")
]


@pytest.mark.cuda
@pytest.mark.parametrize(("act", "has_residual"), FUSED)
def test_the_fused_kernel(act: Activation, has_residual: bool) -> None:
    """The fused kernel, which sizes from 4096 x 2048 on use, agrees with float64."""
    x = torch.randn(4096, 2048, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(4096, 2048, device="cuda") / 45).bfloat16().requires_grad_()
    bias = torch.randn(4096, device="cuda", requires_grad=True)
    residual = torch.randn(4096, 4096, device="cuda").bfloat16() if has_residual else None
    out = torchkiln.linear(x, weight, bias, act=act, scale=0.7, residual=residual)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, (x, weight, bias), grad)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    truth = FORMULAS[act].exact(F.linear(wide[0], wide[1]) * 0.7 + wide[2])
    expected = torch.autograd.grad(truth, wide, grad.double())
    if residual is not None:
        truth = truth + residual.double()
    for found, right in zip((out, *grads), (truth, *expected), strict=True):
        assert ((found.double() - right).norm() / right.norm()).item() < 6e-3


@pytest.mark.cuda
@pytest.mark.parametrize("act", ["none", "gelu"])
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(4097, 1024, 1021), (4097, 1021, 1024)], ids=str)
def test_rows_that_are_no_multiples_of_16_bytes(
    sizes: tuple[int, int, int], bias_dtype: torch.dtype | None, act: Activation
) -> None:
    rows, size, columns = sizes
    x = torch.randn(rows, size, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(columns, size, device="cuda") / 32).bfloat16().requires_grad_()
    leaves = [x, weight]
    if bias_dtype is not None:
        leaves.append(torch.randn(columns, device="cuda", dtype=bias_dtype, requires_grad=True))
    bias = leaves[2] if bias_dtype is not None else None
    told = torchkiln.explain(torchkiln.linear, x, weight)
    assert "to sizes of multiples of 16 bytes" in str(told)
    out = torchkiln.linear(x, weight, bias, act=act)
    assert out.is_contiguous()
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = FORMULAS[act].exact(F.linear(wide[0], wide[1], wide[2] if bias is not None else None))
    expected = torch.autograd.grad(truth, wide, grad.double())
    for found, right in zip((out, *grads), (truth, *expected), strict=True):
        assert ((found.double() - right).norm() / right.norm()).item() < 6e-3
    few = torchkiln.explain(torchkiln.linear, x[:64].detach(), weight.detach())
    assert "copied" not in str(few)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_float32_layer_without_autocast(device: torch.device, dtype: torch.dtype) -> None:
    """The error names two remedies, both of which work; a graph raises the same error."""
    layer = torchkiln.nn.Linear(6, 4, bias=False, device=device)
    x = torch.randn(3, 6, device=device, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    words = (
        rf"linear: weight: got dtype float32, expected {name}, the dtype of x; cast the layer with "
        rf"\.to\({dtype}\), or call it under torch\.autocast\(x\.device\.type, {dtype}\)"
    )
    torch.compiler.reset()
    for call in (layer, torch.compile(layer, fullgraph=True, backend="eager")):
        with pytest.raises(RuntimeError, match=words):
            call(x)
    with torch.autocast(device.type, dtype):
        expected = layer(x)
    assert torch.equal(layer.to(dtype)(x), expected)


@pytest.mark.parametrize("k", [33, 64, 258])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_memory_behind_a_row_is_not_used(device: torch.device, dtype: torch.dtype, k: int) -> None:
    """NaN behind each row does not enter; oneDNN's AMX kernels would read 31 elements more."""
    rows = torch.full((130, k + 64), torch.nan, device=device, dtype=dtype)
    rows[:, :k] = torch.randn(130, k, device=device)
    weight = torch.randn(70, k, device=device).to(dtype)
    expected = rows[:, :k].double() @ weight.double().T
    # On a GPU, partial sums over k may be rounded to half precision before they are added.
    eps = torch.finfo(dtype).eps
    rtol, atol = (0.02, 0.2) if device.type == "cuda" else (eps, 1e-4)
    for found in (
        matmul(rows[:, :k], weight.T),
        torchkiln.linear(rows[:, :k], weight),
        matmul(rows[:, :k].expand(2, -1, -1), weight.T.expand(2, -1, -1))[1],
    ):
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)
