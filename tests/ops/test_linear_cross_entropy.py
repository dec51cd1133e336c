"""linear_cross_entropy beyond the contract: combined options, chunks, subsets of gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dtypes import every_dtype, name
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import torchkiln
from torchkiln.testing.specs.cross_entropy import LINEAR_CROSS_ENTROPY
from torchkiln.typing import Reduction

NAMES = ("x", "weight", "bias")


def layer(
    device: torch.device, dtype: torch.dtype, rows: int, *, features: int = 8, classes: int = 13
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, target and bias; the floating-point tensors require gradients."""
    x = torch.randn(rows, features, device=device).to(dtype)
    weight = (torch.randn(classes, features, device=device) / features**0.5).to(dtype)
    bias = torch.randn(classes, device=device).to(dtype)
    target = torch.randint(classes, (rows,), device=device)
    return x.requires_grad_(), weight.requires_grad_(), target, bias.requires_grad_()


def exact(*args: Any) -> list[Any]:
    """The arguments, floating-point tensors in float64."""
    return [
        a.detach().double().requires_grad_(a.requires_grad)
        if isinstance(a, Tensor) and a.is_floating_point()
        else a
        for a in args
    ]


def require_near(found: Tensor, expected: Tensor, rows: int = 1) -> None:
    """The error is relative to the largest element, as terms cancel, and grows with sqrt(rows)."""
    inside = 1e-16 if found.dtype == torch.float64 else 1e-7
    eps = 3 * torch.finfo(found.dtype).eps + inside * rows**0.5
    size = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=eps, atol=eps * size)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")
def test_called_as_torchs_function(device: torch.device) -> None:
    x, weight, target, bias = layer(device, torch.float64, 5)
    options: dict[str, Any] = {"weight": torch.rand(13, device=device).double(), "ignore_index": 2}
    options |= {"linear_bias": bias, "reduction": "sum", "label_smoothing": 0.1}
    expected = F.linear_cross_entropy(x, weight, target, **options)
    torch.testing.assert_close(
        torchkiln.linear_cross_entropy(x, weight, target, **options), expected
    )
    options |= {"input": x, "linear_weight": weight, "target": target}
    torch.testing.assert_close(torchkiln.linear_cross_entropy(**options), expected)


@every_dtype
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("rows", [5, 8199])
def test_every_combination(
    device: torch.device, dtype: torch.dtype, reduction: Reduction, rows: int
) -> None:
    """Values and gradients of all combinations agree with float64, in one chunk and in two."""
    numbers = ((0.0, 0.1), (False, True), (0.0, 0.02), (None, 3.0), (1.0, 0.6))
    choices = list(itertools.product(*numbers))
    for smoothing, weighted, z_loss, softcap, temperature in choices[:: 1 if rows < 99 else 9]:
        x, weight, target, bias = layer(device, dtype, rows)
        target[1::3] = 4
        options: dict[str, Any] = {"label_smoothing": smoothing, "z_loss": z_loss}
        options |= {"reduction": reduction, "softcap": softcap, "ignore_index": 4}
        options["temperature"] = temperature
        if weighted:
            options["weight"] = torch.rand(13, device=device).to(dtype)
        found = torchkiln.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)
        wide = exact(x, weight, target, bias)
        if weighted:
            options["weight"] = options["weight"].double()
        expected = LINEAR_CROSS_ENTROPY.reference(*wide, **options)
        assert found.dtype == dtype
        require_near(found.detach(), expected.detach())
        grad = torch.rand_like(found) + 0.5
        gradients = torch.autograd.grad(found, (x, weight, bias), grad)
        truth = torch.autograd.grad(expected, (wide[0], wide[1], wide[3]), grad.double())
        for one, other in zip(gradients, truth, strict=True):
            assert one.dtype == dtype
            require_near(one, other, rows)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_any_subset_of_gradients(device: torch.device, reduction: Reduction) -> None:
    """A gradient does not depend on which other gradients are computed."""
    x, weight, target, bias = layer(device, torch.float32, 9)
    leaves = dict(zip(NAMES, (x, weight, bias), strict=True))

    def gradients(wanted: tuple[str, ...]) -> dict[str, Tensor]:
        given = [leaf.detach().requires_grad_(n in wanted) for n, leaf in leaves.items()]
        x, weight, bias = given
        loss = torchkiln.linear_cross_entropy(
            x, weight, target, linear_bias=bias, reduction=reduction
        )
        inputs = [leaf for leaf in given if leaf.requires_grad]
        found = torch.autograd.grad(loss, inputs, torch.full_like(loss, 0.3))
        return dict(zip(wanted, found, strict=True))

    all_of_them = gradients(NAMES)
    for count in (1, 2):
        for wanted in itertools.combinations(NAMES, count):
            for n, found in gradients(wanted).items():
                torch.testing.assert_close(found, all_of_them[n])
    loss = torchkiln.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction=reduction)
    (alone,) = torch.autograd.grad(loss, weight, torch.full_like(loss, 0.3))
    torch.testing.assert_close(alone, all_of_them["weight"])


def test_backward_twice(device: torch.device) -> None:
    """Backward does not change the saved gradients: a second one has the same results."""
    for reduction in ("none", "mean"):
        x, weight, target, _ = layer(device, torch.float32, 9)
        loss = torchkiln.linear_cross_entropy(x, weight, target, reduction=reduction)
        grad = torch.rand_like(loss)
        first = torch.autograd.grad(loss, (x, weight), grad, retain_graph=True)
        again = torch.autograd.grad(loss, (x, weight), 2 * grad)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(2 * one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_sums_of_many_chunks_are_float32(device: torch.device, dtype: torch.dtype) -> None:
    """40,960 equal terms are added exactly, which a sum in half precision could not."""
    rows = 5 * 8192
    x = torch.ones(rows, 1, device=device, dtype=dtype)
    weight = torch.zeros(2, 1, device=device, dtype=dtype, requires_grad=True)
    target = torch.zeros(rows, device=device, dtype=torch.int64)
    bias = torch.zeros(2, device=device, requires_grad=True)
    loss = torchkiln.linear_cross_entropy(x, weight, target, linear_bias=bias)
    found = torch.autograd.grad(loss, (weight, bias))
    for gradient in found:
        assert gradient.flatten().tolist() == [-0.5, 0.5]
    assert found[1].dtype == torch.float32


def test_a_gradient_scale_reaches_small_numbers(device: torch.device) -> None:
    """Gradients are stored before the division by the rows, so float16 keeps their digits.

    Gradients of x are at most 1e-2, and 3e-6 after the division, where float16 has steps of 6e-8.
    """
    x, weight, target, _ = layer(device, torch.float16, 4000, classes=50)
    with torch.no_grad():
        weight *= 2.0**-8
    loss = torchkiln.linear_cross_entropy(x, weight, target, loss_dtype=torch.float32)
    found = torch.autograd.grad(loss * 2.0**16, (x, weight))
    wide = exact(x, weight, target)
    expected = F.cross_entropy(F.linear(wide[0], wide[1]), target) * 2.0**16
    for one, other in zip(found, torch.autograd.grad(expected, wide[:2]), strict=True):
        require_near(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"softcap": 9.0}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32], ids=name)
def test_classes_that_are_no_multiple_of_8(
    bias_dtype: torch.dtype | None, options: dict[str, Any]
) -> None:
    """Three chunks whose products are padded to a multiple of 8 classes agree with float64.

    Logits of up to 5 are rounded to 2^-9 of themselves, which changes probabilities by 1 %.
    """
    cuda = torch.device("cuda", 0)
    x, weight, target, _ = layer(cuda, torch.bfloat16, 18001, features=1024, classes=4093)
    leaves = [x, weight]
    if bias_dtype is not None:
        leaves.append(torch.randn(4093, device=cuda, dtype=bias_dtype, requires_grad=True))
    bias = leaves[2] if bias_dtype is not None else None
    options = {**options, "linear_bias": bias}
    told = torchkiln.explain(torchkiln.linear_cross_entropy, x, weight, target, **options)
    assert "copied: the weight" in str(told)
    loss = torchkiln.linear_cross_entropy(x, weight, target, **options)
    found = torch.autograd.grad(loss.sum(), leaves)
    wide = exact(*leaves)
    logits = F.linear(wide[0], wide[1], wide[2] if bias is not None else None)
    if "softcap" in options:
        logits = 9 * torch.tanh(logits / 9)
    expected = F.cross_entropy(logits, target, reduction=options.get("reduction", "mean"))
    truth = torch.autograd.grad(expected.sum(), wide)
    for one, other in zip((loss.detach(), *found), (expected.detach(), *truth), strict=True):
        assert ((one.double() - other).norm() / other.norm()).item() < 1e-2
    if "softcap" in options:
        return
    with torch.no_grad():
        x[7], target[7] = torch.inf, -100
    loss = torchkiln.linear_cross_entropy(x, weight, target, **options)
    (grad_x,) = torch.autograd.grad(loss.sum(), x)
    assert not grad_x[7].any()


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
def test_a_gradient_from_one_product(options: dict[str, Any]) -> None:
    """A large bfloat16 weight's gradient is one product, not a float32 sum over chunks."""
    cuda = torch.device("cuda", 0)
    x, weight, target, _ = layer(cuda, torch.bfloat16, 300, features=1024, classes=16641)
    loss = torchkiln.linear_cross_entropy(x, weight, target, **options)
    found = torch.autograd.grad(loss.sum(), (x, weight))
    wide = exact(x, weight, target)
    expected = F.cross_entropy(F.linear(wide[0], wide[1]), target, **options)
    for one, other in zip(found, torch.autograd.grad(expected.sum(), wide[:2]), strict=True):
        assert ((one.double() - other).norm() / other.norm()).item() < 1e-2


@pytest.mark.cuda
def test_one_chunk_in_place_of_a_sum() -> None:
    """One chunk of 4,200 rows is used if chunks of 2,100 and a float32 sum would take more memory.

    With the accuracy, logits do not use the memory of the gradient.
    """
    cuda = torch.device("cuda", 0)
    for features, rows in ((2304, 4200), (2048, 2100)):
        x, weight, target, _ = layer(cuda, torch.bfloat16, 4200, features=features, classes=131072)
        told = torchkiln.explain(
            torchkiln.linear_cross_entropy, x, weight, target, return_accuracy=True
        )
        assert f"logits of {rows} rows at a time" in told.forward.notes


@pytest.mark.cuda
@every_dtype
def test_few_classes_are_one_chunk(dtype: torch.dtype) -> None:
    """All rows are one chunk if the logits have at most an eighth of x's elements."""
    cuda = torch.device("cuda", 0)
    for classes, rows in ((8, 9600), (9, 4800)):
        x, weight, target, _ = layer(cuda, dtype, 9600, features=64, classes=classes)
        told = torchkiln.explain(torchkiln.linear_cross_entropy, x, weight, target)
        assert f"logits of {rows} rows at a time" in told.forward.notes
        loss = torchkiln.linear_cross_entropy(x, weight, target)
        found = torch.autograd.grad(loss, (x, weight))
        wide = exact(x, weight, target)
        expected = F.cross_entropy(F.linear(wide[0], wide[1]), target)
        truth = torch.autograd.grad(expected, wide[:2])
        for one, other in zip((loss.detach(), *found), (expected.detach(), *truth), strict=True):
            assert ((one.double() - other).norm() / other.norm()).item() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_a_float32_bias(device: torch.device, dtype: torch.dtype) -> None:
    """A float32 bias is added before the logits are rounded; its gradient is float32."""
    x, weight, target, _ = layer(device, dtype, 33)
    bias = torch.randn(13, device=device, requires_grad=True)
    loss = torchkiln.linear_cross_entropy(x, weight, target, linear_bias=bias)
    (found,) = torch.autograd.grad(loss, bias)
    wide = exact(x, weight, target, bias)
    expected = F.cross_entropy(F.linear(wide[0], wide[1], wide[3]), target)
    assert found.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), expected, rtol=2 * eps, atol=0)
    (truth,) = torch.autograd.grad(expected, wide[3])
    torch.testing.assert_close(found.double(), truth, rtol=eps, atol=eps * float(truth.abs().max()))
    with torch.no_grad():  # half precision has steps of 0.125 or 1 near the bias
        x.fill_(1)
        weight.fill_(32)
        bias -= 256
    options: dict[str, Any] = {"reduction": "none"}
    loss = torchkiln.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)
    expected = F.cross_entropy((bias.detach().double() + 256).expand(33, 13), target, **options)
    torch.testing.assert_close(loss.double(), expected, rtol=2 * eps, atol=0)


@every_dtype
def test_all_rows_ignored(device: torch.device, dtype: torch.dtype) -> None:
    """The mean of no rows is NaN, their sum is 0, and the gradients are 0."""
    x, weight, target, bias = layer(device, dtype, 5)
    for rows in (5, 0):
        for reduction in ("none", "sum", "mean"):
            loss = torchkiln.linear_cross_entropy(
                x[:rows],
                weight,
                torch.full_like(target[:rows], 2),
                linear_bias=bias,
                ignore_index=2,
                reduction=reduction,
                label_smoothing=0.1,
            )
            assert torch.equal(loss.isnan(), torch.full_like(loss, reduction == "mean").bool())
            assert (loss.nan_to_num() == 0).all()
            for found in torch.autograd.grad(loss, (x, weight, bias), torch.ones_like(loss)):
                assert (found == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_autocast(device: torch.device, dtype: torch.dtype) -> None:
    """Autocast casts x and weight, not a float32 bias; the loss is float32 by default."""
    x, weight, target, bias = layer(device, torch.float32, 9)
    with torch.autocast(device.type, dtype):
        loss = torchkiln.linear_cross_entropy(x, weight, target, linear_bias=bias)
        assert torchkiln.linear_cross_entropy(x, weight, target, loss_dtype=dtype).dtype == dtype
        double = torchkiln.linear_cross_entropy(x.double(), weight.double(), target)
    assert loss.dtype == torch.float32
    assert double.dtype == torch.float64
    half = x.detach().to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_()
    by_hand = torchkiln.linear_cross_entropy(
        half[0], half[1], target, linear_bias=bias, loss_dtype=torch.float32
    )
    assert torch.equal(loss, by_hand)
    found = torch.autograd.grad(loss, (x, weight, bias))
    expected = torch.autograd.grad(by_hand, (*half, bias))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())


def test_class_weights_that_require_a_gradient() -> None:
    x, weight, target, _ = layer(torch.device("cpu"), torch.float32, 3)
    words = r"^torchkiln\.linear_cross_entropy: weight: got a tensor that requires a gradient"
    with pytest.raises(RuntimeError, match=words):
        torchkiln.linear_cross_entropy(x, weight, target, weight=torch.ones(13, requires_grad=True))


def test_a_target_that_is_no_class_on_the_cpu() -> None:
    """An invalid target raises an error on a CPU; on a GPU the kernel traps."""
    x, weight, target, _ = layer(torch.device("cpu"), torch.float32, 9)
    target[4] = 13
    with pytest.raises(IndexError, match="target: got 13, expected one of 13 classes"):
        torchkiln.linear_cross_entropy(x, weight, target)


def test_the_module_has_a_linear_layer(device: torch.device) -> None:
    """The state_dict is that of torch's LinearCrossEntropyLoss; the weight can be shared."""
    torch.manual_seed(0)
    torchs = nn.Linear(8, 13, device=device)
    torch.manual_seed(0)
    ours = torchkiln.nn.LinearCrossEntropyLoss(8, 13, bias=True, device=device)
    assert torch.equal(ours.linear.weight, torchs.weight)
    state = {f"linear.{name}": value for name, value in torchs.state_dict().items()}
    ours.load_state_dict(state)
    if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.13
        theirs = nn.LinearCrossEntropyLoss(8, 13, bias=True, device=device)
        theirs.load_state_dict(ours.state_dict())
    x, target = torch.randn(3, 4, 8, device=device), torch.randint(13, (3, 4), device=device)
    expected = F.cross_entropy(torchs(x).flatten(0, 1), target.flatten())
    torch.testing.assert_close(ours(x, target), expected)
    embedding = nn.Embedding(13, 8, device=device)
    tied = torchkiln.nn.LinearCrossEntropyLoss(8, 13, device=device)
    tied.linear.weight = embedding.weight
    tied(embedding(target), target).backward()
    assert embedding.weight.grad is not None
    assert tied.linear.bias is None


def test_explain_tells_the_rows_of_a_chunk() -> None:
    x, weight, target, _ = layer(torch.device("cpu"), torch.float32, 9000, features=2, classes=3)
    with torch.no_grad():
        found = torchkiln.explain(torchkiln.linear_cross_entropy, x, weight, target)
    assert "logits of 4500 rows at a time" in found.forward.notes


def test_products_are_counted() -> None:
    """A mean computes 3 products in forward; losses per row compute 1, and 3 in backward."""
    x, weight, target, _ = layer(torch.device("cpu"), torch.float32, 9)
    product = 2 * 9 * 8 * 13
    products: tuple[tuple[Reduction, int, int], ...] = (("mean", 3, 3), ("none", 1, 4))
    for reduction, forward, both in products:
        with FlopCounterMode(display=False) as counter:
            loss = torchkiln.linear_cross_entropy(x, weight, target, reduction=reduction)
            assert counter.get_total_flops() == forward * product
            loss.sum().backward()
        assert counter.get_total_flops() == both * product
