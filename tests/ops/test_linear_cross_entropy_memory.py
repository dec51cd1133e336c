"""linear_cross_entropy with logits in the memory of the weight's gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cross_entropy_memory import peak_bytes
from torch import Tensor

import torchkiln
from torchkiln.testing.specs.cross_entropy import LINEAR_CROSS_ENTROPY
from torchkiln.typing import Reduction

CPU = torch.device("cpu")
ROWS, CLASSES = 128, 33024
NOTE = "logits of {} classes in memory of their own"


def first_part(rows: int, features: int, classes: int) -> int:
    """The number of classes whose logits do not fit into the memory of the gradient."""
    ratio = rows / features
    third = int(classes / (1 + ratio + ratio**2)) // 128 * 128
    second = -(-rows * third // (features * 128)) * 128
    return classes - second - third


def layer(rows: int, features: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """x, weight and target; targets in all parts of the classes, every seventh ignored."""
    x = torch.randn(rows, features, device=device).to(dtype)
    weight = (torch.randn(CLASSES, features, device=device) / features**0.5).to(dtype)
    target = torch.randint(CLASSES, (rows,), device=device)
    target[3::7] = -100
    return [x.requires_grad_(), weight.requires_grad_(), target]


def require_near(found: Tensor, expected: Tensor) -> None:
    """The error is relative to the largest element, because terms cancel."""
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    ("features", "reduction", "options"),
    [
        (128, "mean", {}),
        (64, "sum", {"label_smoothing": 0.1, "z_loss": 0.01, "temperature": 0.8, "weight": 1}),
        (150, "mean", {"linear_bias": 1, "z_loss": 0.1}),
    ],
)
def test_results_and_gradients(
    features: int, reduction: Reduction, options: dict[str, Any]
) -> None:
    given = layer(ROWS, features, CPU, torch.float32)
    extra = {k: torch.rand(CLASSES) for k, v in options.items() if isinstance(v, int)}
    bias = [each.requires_grad_() for k, each in extra.items() if k == "linear_bias"]
    options = {**options, **extra, "reduction": reduction}
    told = torchkiln.explain(torchkiln.linear_cross_entropy, *given, **options)
    note = NOTE.format(first_part(ROWS, features, CLASSES))
    assert any(each.startswith(note) for each in told.forward.notes)
    found = torchkiln.linear_cross_entropy(*given, **options)
    leaves = [*given[:2], *bias]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    options.pop("linear_bias", None)
    options |= {k: v.double() for k, v in options.items() if isinstance(v, Tensor)}
    expected = LINEAR_CROSS_ENTROPY.reference(*wide[:2], given[2], *wide[2:], **options)
    require_near(found.detach(), expected.detach())
    ours = torch.autograd.grad(3 * found, leaves)
    for one, other in zip(ours, torch.autograd.grad(3 * expected, wide), strict=True):
        require_near(one, other)


def test_rows_without_finite_logits() -> None:
    """Whole parts of the classes, and a whole row, may have logits of -infinity."""
    x, weight, target = layer(ROWS, 128, CPU, torch.float32)
    bias = torch.zeros(CLASSES)
    bias[20000:] = -torch.inf
    target.fill_(7)
    options: dict[str, Any] = {"linear_bias": bias}
    found = torchkiln.linear_cross_entropy(x, weight, target, **options)
    some = weight.detach()[:20000].clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(x @ some.T, target)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(y, (x, w)) for y, w in ((found, weight), (expected, some)))
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1][:20000], theirs[1])
    assert not ours[1][20000:].any()
    bias.fill_(-torch.inf)
    assert torchkiln.linear_cross_entropy(x, weight, target, **options).isnan()


def peak_of_forward(x: Tensor, weight: Tensor, target: Tensor) -> int:
    """Peak bytes of the forward, which computes both gradients."""
    forward = torch.ops.torchkiln._linear_cross_entropy_forward.default
    numbers: Any = (None, None, -100, "mean", 0.0, 0.0, None, False, None, 1.0, [True, True, False])

    def step() -> None:
        with torch.no_grad():
            forward(x, weight, target, *numbers)

    step()
    return peak_bytes(x.device, step)


@pytest.mark.parametrize("features", [128, 64])
def test_peak_of_forward(features: int) -> None:
    """The peak is both gradients and the logits of the first part."""
    given = layer(ROWS, features, CPU, torch.float32)
    logits = ROWS * first_part(ROWS, features, CLASSES)
    expected = 4 * (given[0].numel() + given[1].numel() + logits)
    assert expected <= peak_of_forward(*given) <= expected + 256 * ROWS


@pytest.mark.cuda
def test_bfloat16_on_a_gpu() -> None:
    """bfloat16 gradients agree with those of losses per row, which are computed otherwise."""
    cuda = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=cuda).bfloat16().requires_grad_()
    weight = (torch.randn(131072, 4096, device=cuda) / 64).bfloat16().requires_grad_()
    target = torch.randint(131072, (4096,), device=cuda)
    rows = torchkiln.linear_cross_entropy(x, weight, target, reduction="none")
    theirs = torch.autograd.grad(rows, (x, weight), torch.full_like(rows, 2.0**-12))

    found = torchkiln.linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(found.float(), rows.float().mean(), rtol=1e-2, atol=0.0)
    for one, other in zip(torch.autograd.grad(found, (x, weight)), theirs, strict=True):
        assert (one - other).float().norm() <= 1e-2 * other.float().norm()
    gradients = 2 * (x.numel() + weight.numel())
    logits = 2 * 4096 * first_part(4096, 4096, 131072)
    assert peak_of_forward(x, weight, target) <= gradients + logits + 4 * x.numel() + 2**24
