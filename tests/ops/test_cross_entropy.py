"""cross_entropy beyond the contract: combined options, special values, invalid targets."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cross_entropies import gradient, some
from dtypes import every_dtype, name
from torch import Tensor, nn

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.specs import cross_entropy as contract
from torchkiln.testing.specs.cross_entropy import probabilities
from torchkiln.typing import Reduction

INF = math.inf


@every_dtype
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_every_combination(
    device: torch.device, dtype: torch.dtype, reduction: Reduction, kind: str
) -> None:
    """Values and gradients of all combinations of options agree with float64."""
    choices = list(itertools.product((0.0, 0.1, 1.0), (False, True), (-100, 3), (0.0, 0.02)))
    for shape in ((5, 7), (3, 129), (2, 7, 3)):
        for smoothing, weighted, ignored, z_loss in choices:
            logits = (2 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
            options: dict[str, Any] = {"label_smoothing": smoothing, "z_loss": z_loss}
            options["reduction"] = reduction
            if weighted:
                options["weight"] = torch.rand(shape[1], device=device).to(dtype)
            if kind == "classes":
                target = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
                target[0], target[1] = ignored, 1
                options["ignore_index"] = ignored
            else:
                target = probabilities(logits.detach())
            found = torchkiln.cross_entropy(logits, target, **options)
            wide = logits.detach().double().requires_grad_()
            if kind == "probabilities":
                target = target.double()
            if weighted:
                options["weight"] = options["weight"].double()
            expected = contract.reference(wide, target, **options)
            assert found.dtype == dtype
            eps = max(torch.finfo(dtype).eps, 1e-7)
            torch.testing.assert_close(found.double(), expected, rtol=4 * eps, atol=4 * eps)
            grad = torch.randn_like(found)
            (found_gradient,) = torch.autograd.grad(found, logits, grad)
            (expected_gradient,) = torch.autograd.grad(expected, wide, grad.double())
            torch.testing.assert_close(
                found_gradient.double(), expected_gradient, rtol=4 * eps, atol=4 * eps
            )


@every_dtype
@pytest.mark.parametrize("count", [7, 1025])
def test_all_rows_ignored(device: torch.device, dtype: torch.dtype, count: int) -> None:
    """The mean of no rows is NaN, their sum is 0, and the gradient is 0."""
    logits = torch.randn(5, count, device=device).to(dtype).requires_grad_()
    target = torch.full((5,), 2, device=device)
    losses: tuple[tuple[Reduction, Any], ...] = (
        ("none", [0.0] * 5),
        ("sum", 0.0),
        ("mean", math.nan),
    )
    for reduction, expected in losses:
        for more in (0.0, 0.1):
            loss = torchkiln.cross_entropy(
                logits,
                target,
                ignore_index=2,
                reduction=reduction,
                label_smoothing=more,
                z_loss=more,
            )
            np.testing.assert_equal(loss.tolist(), expected)
            assert (gradient(loss, logits)[0] == 0).all()


def test_no_rows(device: torch.device) -> None:
    for shape in ((0, 5), (0, 5, 3), (2, 5, 0)):
        logits = torch.randn(shape, device=device, requires_grad=True)
        for target in (torch.zeros(shape[:1] + shape[2:], device=device).long(), logits.detach()):
            for reduction in ("none", "sum", "mean"):
                found = torchkiln.cross_entropy(logits, target, reduction=reduction)
                expected = F.cross_entropy(logits, target, reduction=reduction)
                torch.testing.assert_close(found, expected, equal_nan=True)
                assert gradient(found, logits)[0].shape == shape


def test_weights_of_zero(device: torch.device) -> None:
    """A mean over classes whose weights are all 0 is NaN, as in torch; their sum is 0."""
    logits, target = some(device)
    weight = torch.zeros(21, device=device)
    assert torchkiln.cross_entropy(logits, target, weight=weight).isnan()
    assert torchkiln.cross_entropy(logits, target, weight=weight, reduction="sum") == 0


@every_dtype
def test_large_offsets(device: torch.device, dtype: torch.dtype) -> None:
    """An offset of up to 5e4 in all logits adds no error: differences are exact in the dtype."""
    for offset in (1e4, -1e4, 5e4):
        logits = (offset + torch.randn(33, 300, device=device)).to(dtype).requires_grad_()
        wide = logits.detach().double().requires_grad_()
        target = torch.randint(300, (33,), device=device)
        found = torchkiln.cross_entropy(logits, target, reduction="none")
        expected = F.cross_entropy(wide, target, reduction="none")
        eps = max(torch.finfo(dtype).eps, 1e-6)
        torch.testing.assert_close(found.double(), expected, rtol=eps, atol=eps)
        # Backward reads the float32 log-sum-exp, which is rounded in steps of up to 0.004.
        torch.testing.assert_close(
            gradient(found, logits)[0].double(), gradient(expected, wide)[0], rtol=eps, atol=1e-8
        )


@every_dtype
@pytest.mark.parametrize("count", [3, 300, 1200, 5000, 33000])
def test_logits_far_below_zero(device: torch.device, dtype: torch.dtype, count: int) -> None:
    """Logits down to the lowest number do not overflow: each row is shifted by its largest."""
    lowest = -60000.0 if dtype == torch.float16 else torch.finfo(dtype).min
    for value in (-100.0, -1000.0, lowest):
        logits = torch.full((2, count), value, device=device, dtype=dtype)
        logits[1, : count - 1] = -torch.inf
        target = torch.tensor([0, count - 1], device=device)
        found = torchkiln.cross_entropy(logits, target, reduction="none")
        expected = torch.tensor([math.log(count), 0.0], device=device, dtype=torch.float64)
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=4 * step, atol=4 * step)


@pytest.mark.parametrize("count", [6, 300, 5000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_special_values(device: torch.device, count: int, smoothing: float) -> None:
    """Results equal torch's, except that an ignored row has the loss 0 even if it contains NaN."""
    logits = torch.randn(8, count, device=device)
    logits[0, 2] = -INF  # in a class that is not the target
    logits[1, 1] = -INF  # in the target
    logits[2, 2] = INF
    logits[3, 1] = INF
    logits[4, 3] = math.nan
    logits[5] = -INF
    logits[6] = math.nan  # an ignored row
    target = torch.ones(8, dtype=torch.int64, device=device)
    target[6] = -100
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    functions: list[Callable[..., Tensor]] = [torchkiln.cross_entropy, F.cross_entropy]
    losses = [
        f(leaf, target, reduction="none", label_smoothing=smoothing)
        for f, leaf in zip(functions, leaves, strict=True)
    ]
    torch.testing.assert_close(losses[0][:6], losses[1][:6], equal_nan=True)
    assert losses[0][6] == 0
    found, expected = (gradient(y, x)[0] for y, x in zip(losses, leaves, strict=True))
    assert (found[6] == 0).all()
    finite = losses[0].isfinite() & (target != -100)
    torch.testing.assert_close(found[finite], expected[finite])
    assert torch.equal(found[2:6].isnan().any(1), expected[2:6].isnan().any(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("count", [32767, 50257, 151936, 1 << 20, (1 << 20) - 3])
def test_long_rows(device: torch.device, dtype: torch.dtype, count: int) -> None:
    logits = (3 * torch.randn(2, count, device=device)).to(dtype).requires_grad_()
    target = torch.tensor([count - 1, count // 2], device=device)
    wide = logits.detach().double().requires_grad_()
    found = torchkiln.cross_entropy(logits, target, label_smoothing=0.1)
    expected = F.cross_entropy(wide, target, label_smoothing=0.1)
    eps = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(found.double(), expected, rtol=eps, atol=0)
    torch.testing.assert_close(
        gradient(found, logits)[0].double(), gradient(expected, wide)[0], rtol=2 * eps, atol=1e-8
    )


@every_dtype
@pytest.mark.parametrize(
    "shape",
    [(1, 4096), (8, 4097), (16, 4096), (40, 1500), (120, 1000), (300, 10), (9, 3), (20000, 3)],
    ids=str,
)
def test_sums_of_few_rows(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Losses of few rows are added by the kernel that reads them; the last shape has too many."""
    rows, count = shape
    logits = (2 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    target = torch.randint(count, (rows,), device=device)
    if rows > 1:
        target[rows // 2] = -100
    wide = logits.detach().double().requires_grad_()
    weight = torch.rand(count, device=device).to(dtype)
    eps = max(torch.finfo(dtype).eps, 1e-6)
    for reduction, smoothing in itertools.product(("mean", "sum"), (0.0, 0.1)):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        found = torchkiln.cross_entropy(logits, target, weight, loss_dtype=torch.float64, **options)
        expected = F.cross_entropy(wide, target, weight.double(), **options)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        of_logits, truth = gradient(found, logits)[0], gradient(expected, wide)[0]
        near = eps * truth.abs().max().item()  # for the mean of many rows gradients are small
        torch.testing.assert_close(of_logits.double(), truth, rtol=2 * eps, atol=near)


@every_dtype
@pytest.mark.parametrize("rows", [1, 2, 700])
def test_adjacent_rows_of_few_classes(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    """Vectors may contain logits of two rows, and rows may be shorter than a vector."""
    for count in (1, 2, 3, 5, 7, 8, 9, 10, 15, 31, 33, 63, 100, 127, 254, 255, 513):
        logits = (2 * torch.randn(rows, count, device=device)).to(dtype).requires_grad_()
        target = torch.randint(count, (rows,), device=device)
        target[rows // 2] = -100
        weight = torch.rand(count, device=device).to(dtype)
        wide = logits.detach().double().requires_grad_()
        grad = torch.randn(rows, device=device).to(dtype)
        found = torchkiln.cross_entropy(logits, target, weight, reduction="none")
        expected = F.cross_entropy(wide, target, weight.double(), reduction="none")
        (of_logits,) = torch.autograd.grad(found, logits, grad)
        (truth,) = torch.autograd.grad(expected, wide, grad.double())
        eps = max(torch.finfo(dtype).eps, 1e-7)
        torch.testing.assert_close(found.double(), expected, rtol=4 * eps, atol=4 * eps)
        torch.testing.assert_close(of_logits.double(), truth, rtol=4 * eps, atol=4 * eps)
        assert (of_logits[rows // 2] == 0).all()


@pytest.mark.large
@pytest.mark.cuda
def test_more_than_2_to_the_31_elements() -> None:
    """The loss of each row equals that of a separate call, before and after element 2**31."""
    device = torch.device("cuda", 0)
    rows, count = 2**16 + 1, 2**15 + 1
    row = torch.arange(count, device=device).remainder(241).div(60).bfloat16()
    factor = torch.arange(rows, device=device).remainder(7).sub(3).bfloat16()
    logits = (factor.unsqueeze(1) * row).requires_grad_()
    target = torch.arange(rows, device=device).remainder(count)
    loss = torchkiln.cross_entropy(logits, target, reduction="none", loss_dtype=torch.float32)
    (grad,) = gradient(loss, logits)
    middle = 2**31 // count
    for start in (0, middle - 2, rows - 3):
        part = logits.detach()[start : start + 3].double().requires_grad_()
        expected = F.cross_entropy(part, target[start : start + 3], reduction="none")
        torch.testing.assert_close(loss[start : start + 3].double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            grad[start : start + 3].double(), gradient(expected, part)[0], rtol=0.01, atol=1e-6
        )


def test_wrong_types() -> None:
    prefix = r"^torchkiln\.cross_entropy: "
    logits, target = torch.randn(2, 3), torch.tensor([0, 1])
    wrong: dict[str, tuple[object, str]] = {
        "weight": ([1.0], r"got list, expected a torch\.Tensor"),
        "ignore_index": (1.0, "got float, expected an int"),
        "reduction": (None, "got NoneType, expected a str"),
        "label_smoothing": ("0", "got str, expected a number"),
        "z_loss": (torch.tensor(0.1), "got Tensor, expected a number"),
        "loss_dtype": (float, r"got type, expected a torch\.dtype or None"),
        "check_target": (1, "got int, expected a bool"),
        "inplace_backward": (None, "got NoneType, expected a bool"),
    }
    for argument, (value, words) in wrong.items():
        given: dict[str, Any] = {argument: value}
        with pytest.raises(TypeError, match=prefix + f"{argument}: {words}$"):
            torchkiln.cross_entropy(logits, target, **given)
    calls: Any = torchkiln.cross_entropy
    with pytest.raises(TypeError, match=prefix + r"target: got list, expected a torch\.Tensor$"):
        calls(logits, [0, 1])
    with pytest.raises(
        TypeError, match=r"got more than 3 positional arguments, .*; pass options by keyword"
    ):
        calls(logits, target, None, -100)


def test_the_module_has_the_state_of_torchs(device: torch.device) -> None:
    weight = torch.rand(21, device=device)
    logits, target = some(device)
    for given in (None, weight):
        plain = nn.CrossEntropyLoss(given, label_smoothing=0.1)
        layer = torchkiln.nn.CrossEntropyLoss(given, label_smoothing=0.1)
        assert plain.state_dict().keys() == layer.state_dict().keys()
        layer.load_state_dict(plain.state_dict())
        torch.testing.assert_close(layer(logits, target), plain(logits, target))
    assert "label_smoothing=0.1" in repr(layer)


def test_an_overflow_without_a_share_is_nan(device: torch.device) -> None:
    """With label_smoothing 1, an infinite loss of the target times 0 is NaN, as in torch."""
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[largest, -largest, 0.0], [1.0, 2.0, 3.0]], device=device)
    target = torch.tensor([1, 2], device=device)
    found = torchkiln.cross_entropy(logits, target, label_smoothing=1.0, reduction="none")
    expected = F.cross_entropy(logits, target, label_smoothing=1.0, reduction="none")
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found.isnan().tolist() == [True, False]


@pytest.mark.parametrize("how", ["eager", "compiled", "inference"])
def test_half_precision_logits_beside_float32_probabilities(how: str) -> None:
    """The loss is float32 and equals torch's; each gradient has the dtype of its argument."""
    cpu = torch.device("cpu")
    logits = normal("logits", (6, 9), cpu, torch.bfloat16).requires_grad_()
    target = torch.softmax(normal("target", (6, 9), cpu), -1).requires_grad_()
    weight = normal("weight", (9,), cpu, torch.bfloat16).abs() + 0.1
    expected = F.cross_entropy(logits.float(), target, weight.float())
    if how == "inference":
        with torch.inference_mode():
            found = torchkiln.cross_entropy(logits, target, weight)
    else:
        op = torchkiln.cross_entropy
        call = torch.compile(op, backend="aot_eager") if how == "compiled" else op
        found = call(logits, target, weight)
        torch.testing.assert_close(
            torch.autograd.grad(found, (logits, target)),
            torch.autograd.grad(expected, (logits, target)),
        )
    torch.testing.assert_close(found, expected)


def test_class_weights_that_require_a_gradient() -> None:
    weight = torch.ones(4, requires_grad=True)
    words = r"cross_entropy: weight: got a tensor that requires a gradient, .*weight\.detach\(\)"
    for target in (torch.tensor([1, 3]), torch.full((2, 4), 0.25)):
        with pytest.raises(RuntimeError, match=words):
            torchkiln.cross_entropy(torch.zeros(2, 4), target, weight)
        torchkiln.cross_entropy(torch.zeros(2, 4), target, weight.detach())


def test_an_infinite_probability() -> None:
    """Infinite and NaN probabilities give the same losses as in torch."""
    logits = normal("logits", (4, 5), torch.device("cpu"))
    for value in (math.inf, -math.inf, math.nan):
        target = torch.softmax(logits, -1)
        target[1, 2] = value
        for smoothing in (0.0, 0.1):
            options: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
            found = torchkiln.cross_entropy(logits, target, **options)
            expected = F.cross_entropy(logits, target, **options)
            torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["eager", "compiled", "inference"])
def test_a_softcap(how: str, dtype: torch.dtype) -> None:
    """The loss of logits bounded by softcap is computed in float32 for half precision."""
    cpu = torch.device("cpu")
    logits = (9 * normal("logits", (6, 9), cpu)).to(dtype).requires_grad_()
    target, weight = torch.arange(6), (normal("weight", (9,), cpu).abs() + 0.1).to(dtype)
    call = functools.partial(torchkiln.cross_entropy, softcap=5.0, z_loss=0.01)
    wide = logits.to(torch.float64)
    capped = 5 * torch.tanh(wide / 5)
    expected = F.cross_entropy(capped, target, weight.double())
    share = weight.double()[target] / weight.double()[target].sum()
    expected = expected + 0.01 * (share * torch.logsumexp(capped, 1).square()).sum()
    if how == "inference":
        with torch.inference_mode():
            found = call(logits, target, weight)
    else:
        made = torch.compile(call, backend="aot_eager") if how == "compiled" else call
        found = made(logits, target, weight)
        (grad,) = torch.autograd.grad(found, logits)
        (wanted,) = torch.autograd.grad(expected, logits)
        torch.testing.assert_close(grad, wanted)
    torch.testing.assert_close(found, expected.to(dtype))


def test_a_softcap_in_inference_mode_beside_probabilities_of_another_dtype() -> None:
    """Promotion casts before the softcap, in inference mode, too."""
    logits = 3 * normal("logits", (4, 5), torch.device("cpu"), torch.float64)
    target = probabilities(logits).float()
    expected = torchkiln.cross_entropy(logits, target, softcap=1.0)
    with torch.inference_mode():
        found = torchkiln.cross_entropy(logits.clone(), target.clone(), softcap=1.0)
    torch.testing.assert_close(found, expected)


def test_a_softcap_that_is_refused() -> None:
    logits, target = torch.zeros(2, 4), torch.tensor([1, 3])
    words = r"cross_entropy: softcap: got 0, expected a number greater than 0, or None"
    with pytest.raises(ValueError, match=words):
        torchkiln.cross_entropy(logits, target, softcap=0.0)
    module = torchkiln.nn.CrossEntropyLoss(softcap=2.0)
    expected = torchkiln.cross_entropy(logits, target, softcap=2.0)
    torch.testing.assert_close(module(logits, target), expected)
