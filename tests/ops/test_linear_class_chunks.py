"""Gradients of losses per row that are computed one chunk of classes at a time.

This needs more rows than a chunk of rows, and more classes than rows. Rows are copies of a few:
gradients are linear in the incoming ones, so the truth in float64 needs only the few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_cross_entropy_memory import peak_bytes
from test_linear_kl import formula as divergence
from test_logprob import formula as logprob
from torch import Tensor

import torchkiln
from torchkiln.testing.specs.cross_entropy import LINEAR_CROSS_ENTROPY
from torchkiln.typing import Direction

DIFFERENT, COPIES, CLASSES, FEATURES = 33, 256, 16651, 6
ROWS = DIFFERENT * COPIES
CHUNK = 8448
"""Classes of the first chunk; the second chunk has an odd number of classes."""

Function = Callable[..., tuple[Tensor, ...]]


def layer(device: torch.device, dtype: torch.dtype, features: int = FEATURES) -> list[Tensor]:
    """The distinct rows of x, the weight and the bias."""
    made = (torch.randn(n, features, device=device) for n in (DIFFERENT, CLASSES))
    return [*(t.to(dtype) for t in made), torch.randn(CLASSES, device=device).to(dtype)]


def classes(device: torch.device) -> Tensor:
    """Targets of the distinct rows, from both chunks; one is ignored."""
    target = torch.randint(CLASSES, (DIFFERENT,), device=device)
    target[:4] = torch.tensor([0, CHUNK - 1, CHUNK, CLASSES - 1], device=device)
    target[5] = -100
    return target


def require_near(found: Tensor, expected: Tensor) -> None:
    """The error is at most 3 eps and 1e-5 of the largest element, because terms cancel."""
    eps = 3 * torch.finfo(found.dtype).eps + 1e-5
    size = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=eps, atol=eps * size)


def check(given: list[Tensor], ours: Function, truth: Function) -> None:
    """Results and gradients for random incoming gradients agree with the truth."""
    x, weight, bias = (t.detach().requires_grad_() for t in given)
    wide = [t.detach().double().requires_grad_() for t in given]
    every = x.detach().repeat(COPIES, 1).requires_grad_()
    found, expected = ours(every, weight, bias), truth(*wide)
    grads = [torch.randn(COPIES, DIFFERENT, device=x.device) for _ in found]
    of_x, *others = torch.autograd.grad(found, (every, weight, bias), [g.flatten() for g in grads])
    for copy in (0, COPIES - 1):
        (other,) = torch.autograd.grad(
            expected, wide[:1], [g[copy].double() for g in grads], retain_graph=True
        )
        require_near(of_x.view(COPIES, DIFFERENT, -1)[copy], other)
    sums = [g.double().sum(0) for g in grads]
    for one, other in zip(others, torch.autograd.grad(expected, wide[1:], sums), strict=True):
        require_near(one, other)
    for one, other in zip(found, expected, strict=True):
        require_near(one.detach().view(COPIES, DIFFERENT)[-1], other.detach())


@pytest.mark.parametrize(
    ("dtype", "softcap"), [(torch.float32, 9.0), (torch.bfloat16, None), (torch.float16, None)]
)
def test_log_probabilities(dtype: torch.dtype, softcap: float | None, device: torch.device) -> None:
    target = classes(device)
    every = target.repeat(COPIES)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return torchkiln.linear_logprob(
            x, weight, every, bias, temperature=1.3, softcap=softcap, entropy=True
        )

    def truth(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(x, weight, bias)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logprob(logits, target, 1.3)

    check(layer(device, dtype), ours, truth)


def test_losses_of_rows(device: torch.device) -> None:
    """Losses per row agree with float64, with class weights and with a target distribution."""
    target = classes(device)
    every = target.repeat(COPIES)
    weights = torch.rand(CLASSES, device=device)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "temperature": 0.7}
    options["reduction"] = "none"

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        call: Any = torchkiln.linear_cross_entropy
        return (call(x, weight, every, linear_bias=bias, weight=weights, **options),)

    def truth(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        wide = {"weight": weights.double(), **options}
        return (LINEAR_CROSS_ENTROPY.reference(x, weight, target, bias, **wide),)

    check(layer(device, torch.float32), ours, truth)


@pytest.mark.parametrize(
    ("direction", "dtype"),
    [("forward", torch.bfloat16), ("reverse", torch.float32), ("js", torch.float16)],
)
def test_divergences(direction: Direction, dtype: torch.dtype, device: torch.device) -> None:
    y, weight_y, bias_y = layer(device, dtype)
    every = y.repeat(COPIES, 1)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        options: Any = {"temperature": 1.3, "direction": direction, "beta": 0.3}
        return (torchkiln.linear_kl(x, weight, every, weight_y, bias, bias_y, **options),)

    def truth(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        u = F.linear(y.double(), weight_y.double(), bias_y.double())
        return (divergence(F.linear(x, weight, bias) / 1.3, u / 1.3, direction, 0.3),)

    check(layer(device, dtype), ours, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory(dtype: torch.dtype, device: torch.device) -> None:
    """Peak memory: the gradients, one chunk of logits and of their gradient, the sum of x."""
    features = 64
    made = layer(torch.device("cpu"), dtype, features)
    x, weight = (t.to(device) for t in (made[0].repeat(COPIES, 1), made[1]))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    target = classes(device).repeat(COPIES)

    def step() -> None:
        found = torchkiln.linear_logprob(x, weight, target)
        torch.autograd.grad(found, (x, weight), torch.ones_like(found))

    step()
    wide = 4 if dtype == torch.bfloat16 else 0  # float32 copies of half precision
    gradients = (ROWS + CLASSES) * features * dtype.itemsize
    expected = gradients + ROWS * CHUNK * (dtype.itemsize + wide) + ROWS * features * wide
    # The gradient of a small chunk of classes is rounded from float32. Torch's CPU products of half
    # precision make float32 copies of one factor, and of 256 rows of the other.
    copies = CHUNK * features * wide
    if device.type == "cpu":
        copies += ROWS * (features + 256) * wide
    little = 64 * ROWS
    assert expected <= peak_bytes(device, step) <= expected + copies + little
