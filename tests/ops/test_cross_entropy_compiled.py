"""Backward of cross_entropy in Inductor's code: over the logits where nothing reads them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dtypes import name
from test_cross_entropy_memory import peak_bytes
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code

import torchkiln
from torchkiln import cross_entropy
from torchkiln.testing.specs.cross_entropy import classes, probabilities

ROWS, COUNT = 64, 1000


@pytest.fixture(autouse=True)
def with_a_cache_of_its_own() -> Iterator[None]:
    """Inductor's cache of graphs; that of AOTAutograd would hide it."""
    torch.compiler.reset()
    ours: Any = torch._functorch.config.patch(enable_autograd_cache=False)
    with fresh_cache(), torch._inductor.config.patch(fx_graph_cache=True), ours:
        yield
    torch.compiler.reset()


def alone(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(x @ weight, target)


def in_parts(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = (x @ weight).view(4, ROWS // 4, COUNT)
    return cross_entropy(logits.view(-1, COUNT).float(), target, label_smoothing=0.1)


def of_each_row(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return (cross_entropy(x @ weight, target, reduction="none") * x[:, 0]).sum()


def read_before(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Backward of the square reads the logits first, in a kernel that Inductor could run later."""
    logits = x @ weight
    return cross_entropy(logits, target) + logits.square().mean()


def returned(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = x @ weight
    return cross_entropy(logits, target), logits


def returned_without_gradient(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Its backward is that of ``alone``."""
    logits = x @ weight
    return cross_entropy(logits, target), logits.detach()


def returned_as_view(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = x @ weight
    return cross_entropy(logits, target), logits.detach()[:2, 5:]


def read_again(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Backward of tanh reads its result."""
    return cross_entropy((x @ weight).tanh(), target)


def in_columns(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The gradient has rows of adjacent classes, the logits have not."""
    return cross_entropy((weight.t() @ x.t()).t(), target)


IN_PLACE: tuple[Any, ...] = (alone, in_parts, of_each_row, read_before)
NEW: tuple[Any, ...] = (returned, returned_without_gradient, returned_as_view)
AGAIN: tuple[Any, ...] = (read_again, in_columns)


def inputs(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    x = torch.randn(ROWS, 16, device=device).to(dtype).requires_grad_()
    weight = torch.randn(16, COUNT, device=device).to(dtype).requires_grad_()
    return x, weight, torch.randint(COUNT, (ROWS,), device=device)


def step(function: Callable[..., Any], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The loss, its gradients, and logits that are unchanged."""
    found = function(*given)
    loss, *logits = found if isinstance(found, tuple) else (found,)
    before = [x.detach().clone() for x in logits]
    gradients = torch.autograd.grad(loss, given[:2])
    assert all(map(torch.equal, before, logits))
    return loss.detach(), *gradients


@pytest.mark.rotates("dtype", 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("function", IN_PLACE + NEW + AGAIN, ids=lambda x: x.__name__)
def test_gradients(device: torch.device, dtype: torch.dtype, function: Any) -> None:
    given = inputs(device, dtype)
    truth = step(function, tuple(x.double() if x.is_floating_point() else x for x in given))
    expected = step(function, given)
    compiled = torch.compile(function, fullgraph=True)
    found, codes = run_and_get_code(lambda: step(compiled, given))
    for one, other, true in zip(found, expected, truth, strict=True):
        limit = 2 * (other - true).abs().max() + torch.finfo(dtype).eps * true.abs().max()
        assert (one - true).abs().max() <= limit
    calls = "".join(codes)
    assert ("._cross_entropy_backward_.default(" in calls) == (function in IN_PLACE)
    assert ("._cross_entropy_backward.default(" in calls) == (function not in IN_PLACE)


@pytest.mark.parametrize("function", NEW, ids=lambda x: x.__name__)
def test_code_in_the_cache_does_not_overwrite_returned_logits(
    device: torch.device, function: Any
) -> None:
    """Where Inductor has compiled the same backward for logits that nothing else can read."""
    given = inputs(device)
    for each in (alone, function, alone):
        torch.compiler.reset()
        step(torch.compile(each, fullgraph=True), given)


def test_lengths_that_change(device: torch.device) -> None:
    compiled = torch.compile(alone, dynamic=True, fullgraph=True)
    for rows in (64, 48, 9):
        x, weight, target = inputs(device)
        x = x.detach()[:rows].requires_grad_()
        given = x, weight, target[:rows]
        for one, other in zip(step(compiled, given), step(alone, given), strict=True):
            torch.testing.assert_close(one, other)


def test_peak_memory(device: torch.device) -> None:
    """Backward allocates a gradient of the logits only if these are returned."""
    given = inputs(device)
    logits, gradients = ROWS * COUNT * 4, (ROWS + COUNT) * 16 * 4

    def peak(function: Any) -> int:
        compiled: Any = torch.compile(function, fullgraph=True)
        step(compiled, given)
        found = compiled(*given)
        loss = found[0] if isinstance(found, tuple) else found
        return peak_bytes(device, lambda: torch.autograd.grad(loss, given[:2]))

    assert peak(alone) <= gradients + 16 * 512
    assert peak(returned) >= logits + gradients


def layouts(device: torch.device) -> dict[str, Tensor]:
    x = torch.randn(6, 7, device=device)
    wide = torch.randn(2, 5, 3, device=device)
    last = wide.movedim(1, -1).contiguous().movedim(-1, 1)
    return {"rows": x, "columns": x.t(), "images": wide, "channels last": last, "none": x[:0]}


@pytest.mark.parametrize("kind", layouts(torch.device("cpu")))
def test_the_op_writes_any_layout(device: torch.device, kind: str) -> None:
    logits = layouts(device)[kind]
    for target in (classes(logits, -100), probabilities(logits)):
        loss, state = torch.ops.torchkiln._cross_entropy_forward(
            logits, target, None, -100, "sum", 0.1, 0.0, None, False
        )
        given: Any = (target, None, state, -100, "sum", 0.1, 0.0)
        grad = torch.ones_like(loss)
        expected = torch.ops.torchkiln._cross_entropy_backward(grad, logits, *given)
        place = logits.clone()
        torch.library.opcheck(
            torch.ops.torchkiln._cross_entropy_backward_.default, (grad, place, *given)
        )
        version = place._version
        torch.ops.torchkiln._cross_entropy_backward_(grad, place, *given)
        torch.testing.assert_close(place, expected, check_stride=False)
        assert place.stride() == logits.clone().stride()
        assert place.numel() == 0 or place._version > version


def test_logits_that_are_also_the_target_stay(device: torch.device) -> None:
    """The op reads both."""

    def function(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        logits = x @ weight
        return torchkiln.cross_entropy(logits, logits.detach())

    given = inputs(device)
    found, codes = run_and_get_code(lambda: step(torch.compile(function, fullgraph=True), given))
    torch.testing.assert_close(found, step(function, given))
    assert "._cross_entropy_backward_.default(" not in "".join(codes)
