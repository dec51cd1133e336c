"""Feed-forward layers and blocks with ``precision="fp8"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from producers import PRODUCT_DEVICES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchkiln
from torchkiln import gated_mlp, linear_fp8, mlp, quantize_weight
from torchkiln.nn.quantize import CACHES

WIDTH, HIDDEN, TOKENS = 128, 256, 160
Gradients = tuple[Tensor, ...]

ERROR = 0.08
"""Rounding to E4M3 has an error of 2.7 %, a product of two rounded factors 3.8 %, a gate of two
products 5.3 %, and the product of that gate 6.5 %."""


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype).requires_grad_()


def operands(hidden: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """x, both weights and both biases, which require gradients."""
    x = normal(TOKENS, WIDTH, seed=1) * WIDTH**0.5
    weights = normal(hidden, WIDTH, seed=2), normal(WIDTH, HIDDEN, seed=3)
    found = x, *weights, normal(hidden, seed=4), normal(WIDTH, seed=5)
    return tuple(t.detach().to(device).requires_grad_() for t in found)


def gradients(y: Tensor, leaves: tuple[Tensor, ...]) -> Gradients:
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return torch.autograd.grad(y, leaves, grad.to(y))


def bytes_kept(call: Callable[[], Tensor]) -> int:
    """The bytes that a forward saves for backward; each storage counts once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call()
    del y
    return sum(kept.values())


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("save", ["preact", "none"])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_gated_mlp(act: Any, save: Any, has_bias: bool, device: str) -> None:
    """Results equal those of separate ops bit by bit; gradients are rounded in other blocks."""
    leaves = operands(2 * HIDDEN, device)[: 5 if has_bias else 3]
    x, up, down, *biases = leaves
    up_bias, down_bias = biases or (None, None)
    y = gated_mlp(*leaves, act=act, save=save, precision="fp8")
    gates: dict[str, Any] = {
        "silu": torchkiln.swiglu,
        "gelu": torchkiln.geglu,
        "gelu_tanh": lambda t: torchkiln.geglu(t, approximate="tanh"),
    }
    parts = linear_fp8(gates[act](linear_fp8(x, up, up_bias)), down, down_bias)
    assert torch.equal(y, parts)
    plain = gated_mlp(*leaves, act=act)
    assert 1e-3 < relative(y, plain) < ERROR
    of_parts, truth = gradients(parts, leaves), gradients(plain, leaves)
    for found, other, exact in zip(gradients(y, leaves), of_parts, truth, strict=True):
        assert relative(found, exact) < max(1.2 * relative(other, exact), 0.01)


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
@pytest.mark.parametrize("save", ["preact", "none"])
@pytest.mark.parametrize("act", ["none", "relu", "relu2", "gelu"])
def test_mlp(act: Any, save: Any, device: str) -> None:
    leaves = operands(HIDDEN, device)
    x, up, down, up_bias, down_bias = leaves
    y = mlp(*leaves, act=act, save=save, precision="fp8")
    hidden = linear_fp8(x, up, up_bias)
    expected = linear_fp8(
        hidden if act == "none" else getattr(torchkiln, act)(hidden), down, down_bias
    )
    assert torch.equal(y, expected)
    for one, other in zip(gradients(y, leaves), gradients(expected, leaves), strict=True):
        assert torch.equal(one, other)


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth.double()).norm() / truth.double().norm()).item()


def test_save_none_keeps_no_hidden_tensor() -> None:
    leaves = operands(2 * HIDDEN)
    with_all = bytes_kept(lambda: gated_mlp(*leaves, precision="fp8"))
    with_less = bytes_kept(lambda: gated_mlp(*leaves, save="none", precision="fp8"))
    packed = TOKENS * 2 * HIDDEN * 2  # bytes of gate and up in bfloat16
    assert with_all - with_less > 0.9 * packed


def test_a_quantised_input() -> None:
    x, *others = operands(2 * HIDDEN)
    given: Any = torchkiln.quantize(x)
    y, expected = (gated_mlp(one, *others, precision="fp8") for one in (given, x))
    assert torch.equal(y, expected)


def test_words_and_second_derivatives_are_refused() -> None:
    leaves = operands(2 * HIDDEN)
    word: Any = "fp4"
    with pytest.raises(RuntimeError, match="gated_mlp: precision: got 'fp4', expected one of fp8"):
        gated_mlp(*leaves, precision=word)
    with pytest.raises(RuntimeError, match="gated_mlp: act: got 'fp4', expected one of silu, gelu"):
        gated_mlp(*leaves, act=word, precision="fp8")
    for module in (torchkiln.nn.MLP, torchkiln.nn.GatedMLP, torchkiln.nn.Attention):
        with pytest.raises(ValueError, match="precision: got 'fp4', expected one of fp8"):
            module(8, 8, precision=word)
    y = gated_mlp(*leaves, precision="fp8")
    with pytest.raises(NotImplementedError, match="linear_fp8: got a second derivative"):
        torch.autograd.grad(y.float().sum(), leaves[0], create_graph=True)


def test_modules_hold_the_same_parameters() -> None:
    for make in (
        lambda **given: torchkiln.nn.MLP(WIDTH, HIDDEN, **given),
        lambda **given: torchkiln.nn.GatedMLP(WIDTH, HIDDEN, **given),
    ):
        module, plain = make(precision="fp8"), make()
        module.load_state_dict(plain.state_dict())
        assert "precision='fp8'" in repr(module)
        assert "precision" not in repr(plain)
        x = torch.randn(TOKENS, WIDTH)
        assert 1e-3 < relative(module(x), plain(x)) < ERROR
        assert len([layer for layer in module.modules() if layer in CACHES]) == 2


def block(precision: Any = None, **options: Any) -> torchkiln.nn.TransformerBlock:
    """A block with the same parameters in each call."""
    torch.manual_seed(0)
    return torchkiln.nn.TransformerBlock(
        WIDTH, 4, 2, hidden_features=HIDDEN, precision=precision, **options
    )


FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"norm": "layer", "bias": True, "gated": False, "act": "gelu_tanh"},
    {"save": "none", "qk_norm": "head"},
)


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
@pytest.mark.parametrize("options", FORMS)
def test_blocks(options: dict[str, Any], device: str) -> None:
    ours, plain = (block(word, **options).to(device) for word in ("fp8", None))
    x = torch.randn(2, 80, WIDTH, device=device)
    results = []
    both: tuple[Any, ...] = ours, plain
    for one in both:
        y, residual = one(x)
        (y + residual).square().mean().backward()
        results.append(y + residual)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert 1e-4 < relative(*results) < ERROR
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), 0) > 0.98, name


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
def test_blocks_compiled_and_checkpointed(device: str) -> None:
    ours, x = block("fp8", save="none").to(device), torch.randn(2, 80, WIDTH, device=device)
    y, residual = ours(x)
    again: Any = checkpoint(ours, x, use_reentrant=False)
    assert torch.equal(again[0], y)
    compiled: Any = torch.compile(ours, backend="aot_eager", fullgraph=True)
    z, total = compiled(x)
    torch.testing.assert_close(z + total, y + residual, rtol=1e-2, atol=1e-2)
    (z + total).square().mean().backward()


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("has_residual", [False, True])
def test_norms_of_blocks_write_e4m3(
    options: dict[str, Any], device: str, *, has_residual: bool
) -> None:
    """Norms write E4M3, except in a block with a hook, which must get a tensor."""
    ours, other = (block("fp8", **options).to(device) for _ in range(2))
    seen: list[type] = []
    for layer in (other.attention, other.mlp):
        layer.register_forward_pre_hook(lambda _, given: seen.append(type(given[0])))
    x = torch.randn(2, 80, WIDTH, device=device).requires_grad_()
    given = (x, x.detach().flip(0)) if has_residual else (x,)
    results = []
    both: tuple[Any, ...] = ours, other
    for one in both:
        with Ops() as ops:
            y, residual = one(*given)
        assert sum("norm_fp8" in name for name in ops.names) == (2 if one is ours else 0)
        (y + residual).square().mean().backward()
        results.append((y + residual, *(p.grad for p in one.parameters())))
    assert seen == [Tensor, Tensor]
    for found, expected in zip(*results, strict=True):
        if device == "cpu":
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        else:
            assert relative(found, expected) < ERROR
    with torch.autocast(device, torch.bfloat16):
        y, residual = ours(*given)
        expected, _ = other(*given)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
def test_a_quantised_tensor_under_autocast(device: str) -> None:
    """Autocast changes the dtype of the result only, not the quantised numbers or gradients."""
    x, weight = (torch.randn(*s, device=device) for s in ((TOKENS, WIDTH), (HIDDEN, WIDTH)))
    leaves = [x, weight / WIDTH**0.5, torch.rand(WIDTH, device=device)]
    x, weight, scale = (leaf.requires_grad_() for leaf in leaves)
    exact = linear_fp8(torchkiln.rms_norm_fp8(x, WIDTH, scale), weight)
    with torch.autocast(device, torch.bfloat16):
        given = torchkiln.rms_norm_fp8(x, WIDTH, scale)
        y = linear_fp8(given, weight)
        hidden = torchkiln.gated_linear_fp8(given, weight)
    assert given.source is not None
    assert given.source.dtype == torch.float32
    assert hidden.source is not None
    assert y.dtype == hidden.source.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight, scale), grad)
    expected = torch.autograd.grad(exact, (x, weight, scale), grad.float())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert relative(one, other) < 2.0**-7


class Ops(TorchDispatchMode):
    """Records the names of called ops of torchkiln."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "torchkiln":
            self.names.append(func._opname)
        return func(*args, **kwargs or {})


def test_a_quantised_input_of_modules() -> None:
    given: Any = torchkiln.rms_norm_fp8(torch.randn(2, 80, WIDTH), WIDTH)
    make: tuple[Any, ...] = (torchkiln.nn.MLP, torchkiln.nn.GatedMLP, torchkiln.nn.Attention)
    for cls in make:
        words = f"nn.{cls.__name__}: (x|input): got a Quantized, expected a tensor, or a module"
        with pytest.raises(ValueError, match=words):
            cls(WIDTH, 4)(given)
        assert cls(WIDTH, 4, precision="fp8")(given).shape == (2, 80, WIDTH)


def test_weights_of_a_block_are_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def counted(weight: Tensor) -> torchkiln.QuantizedWeight:
        nonlocal count
        count += 1
        return quantize_weight(weight)

    monkeypatch.setattr("torchkiln.nn.quantize.quantize_weight", counted)
    monkeypatch.setattr("torchkiln.nn.quantize.has_group", lambda: False)
    ours = block("fp8")
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
    for step in range(1, 3):
        for _ in range(3):  # three micro-batches
            ours(torch.randn(1, 16, WIDTH))[0].sum().backward()
        assert count == 4 * step
        nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()


@pytest.mark.parametrize("device", PRODUCT_DEVICES)
def test_an_outlier_spoils_its_own_blocks_only(device: str) -> None:
    """An outlier of 1e4 affects its row in forward, and 128 tokens x 128 features in backward."""
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    up, down = (
        normal(*shape, seed=2, dtype=torch.float32).detach().to(device).requires_grad_()
        for shape in ((2 * HIDDEN, WIDTH), (WIDTH, HIDDEN))
    )
    usual = gated_mlp(x, up, down, precision="fp8")
    x[7, 30] = 1e4
    y = gated_mlp(x, up, down, precision="fp8")
    others = torch.arange(256, device=device) != 7
    assert torch.equal(y[others], usual[others])
    truth = gated_mlp(x.double(), up.double(), down.double())
    error = (y - truth).norm(dim=1) / truth.norm(dim=1)
    # Gate and up have the outlier's rounding error in common, at most half a step of 1/8.
    assert error.max() < ERROR + 2 / 16
    grad = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    found = torch.autograd.grad(y, (up, down), grad)
    exact = torch.autograd.grad(truth, (up, down), grad.double())
    for one, other in zip(found, exact, strict=True):
        assert relative(one, other) < 0.1
