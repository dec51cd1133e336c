"""Losses of rows computed side by side, and of transposed logits, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
IGNORED = -100


def targets(logits: Tensor) -> Tensor:
    """A class for each row, and some ignored rows."""
    shape = list(logits.shape)
    classes = shape.pop(1)
    target = torch.randint(classes, shape)
    target.view(-1)[::7] = IGNORED
    return target


def results(op: Callable[..., tuple[Tensor, ...]], logits: Tensor) -> list[Tensor]:
    """The results of a call and the gradient of the logits."""
    leaf = logits.detach().requires_grad_()
    found = op(leaf)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in found]
    grad = torch.autograd.grad(
        found, leaf, [g.to(y.dtype) for g, y in zip(grads, found, strict=True)]
    )
    return [*found, *grad]


def check(
    op: Callable[..., tuple[Tensor, ...]],
    formula: Callable[..., tuple[Tensor, ...]],
    logits: Tensor,
) -> None:
    """Compare with a formula in float64, and two numbers of threads."""
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found.append(results(op, logits))
        finally:
            torch.set_num_threads(before)
    # The incoming gradients are rounded to the dtype of the results.
    eps = torch.finfo(logits.dtype).eps
    for one, other, truth in zip(*found, results(formula, logits.double()), strict=True):
        assert torch.equal(one, other)
        error = (one.double() - truth).abs().max()
        assert error < 8 * eps * truth.abs().max().clamp(1)


def short_rows(classes: int) -> Iterator[Tensor]:
    """Rows of adjacent classes."""
    for rows in (1, 15, 255, 256, 257, 3000):
        yield torch.randn(rows, classes)
    yield torch.randn(400, classes + 5)[:, 2 : classes + 2]


def adjacent_rows(classes: int) -> Iterator[Tensor]:
    """Logits whose rows, but not whose classes, are adjacent."""
    for rows in (64, 65, 257, 3000):
        yield torch.randn(classes, rows).T
    yield torch.randn(2 * classes, 130)[::2].T
    for size in ((8, 8), (5, 13), (16, 17), (300,)):
        yield torch.randn(3, classes, *size)
    yield torch.randn(2, classes + 3, 12, 12)[:, 1 : classes + 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 2, 7, 32, 33, 65])
@pytest.mark.parametrize("form", ["plain", "weights", "z-loss"])
def test_cross_entropy(form: str, classes: int, dtype: torch.dtype) -> None:
    weight = torch.rand(classes).to(dtype) + 0.5 if form == "weights" else None
    z_loss = 0.01 if form == "z-loss" else 0.0
    for logits in (*short_rows(classes), *adjacent_rows(classes)):
        target = targets(logits)

        def op(x: Tensor, target: Tensor = target) -> tuple[Tensor]:
            y = torchkiln.cross_entropy(x, target, weight, reduction="none", z_loss=z_loss)
            return (y,)

        def formula(x: Tensor, target: Tensor = target) -> tuple[Tensor]:
            wide = None if weight is None else weight.double()
            squares = torch.logsumexp(x, 1).square().masked_fill(target == IGNORED, 0)
            loss = F.cross_entropy(x, target, wide, reduction="none")
            return (loss + z_loss * squares,)

        # A copy in the dtype keeps the strides, unless the tensor has gaps.
        check(op, formula, logits.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 2, 7, 32, 33])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprob(temperature: float, classes: int, dtype: torch.dtype) -> None:
    for logits in short_rows(classes):
        target = targets(logits)

        def op(x: Tensor, target: Tensor = target) -> tuple[Tensor, ...]:
            return torchkiln.logprob(x, target, temperature=temperature, entropy=True)

        def formula(x: Tensor, target: Tensor = target) -> tuple[Tensor, ...]:
            logs = torch.log_softmax(x / temperature, 1)
            ignored = target == IGNORED
            own = logs.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
            entropy = -(logs.exp() * logs).sum(1)
            return own.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0)

        check(op, formula, logits.to(dtype))


@pytest.mark.parametrize("layout", ["short", "adjacent"])
@pytest.mark.parametrize("classes", [3, 40])
def test_numbers_that_are_not_finite(classes: int, layout: str) -> None:
    x = torch.randn(100, classes)
    x[1], x[2, 1], x[3] = torch.nan, torch.inf, -torch.inf
    x[4, 0], x[5], x[6, -1] = -torch.inf, 3e38, -3e38
    if layout == "adjacent":
        x = x.T.contiguous().T
    target = torch.full((100,), 2)
    target[0] = IGNORED
    found = results(lambda x: (torchkiln.cross_entropy(x, target, reduction="none"),), x)
    expected = results(lambda x: (F.cross_entropy(x, target, reduction="none"),), x)
    for one, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(one, truth, equal_nan=True)


@pytest.mark.parametrize("classes", [3, 40])
def test_a_class_out_of_range(classes: int) -> None:
    target = torch.zeros(100, dtype=torch.int64)
    target[70] = classes
    for logits in (torch.randn(100, classes), torch.randn(classes, 100).T):
        with pytest.raises(IndexError, match=f"target: got {classes}, expected one of {classes}"):
            torchkiln.cross_entropy(logits, target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 65, 131])
def test_transposed_copies(rows: int, dtype: torch.dtype) -> None:
    for classes in (16, 17, 63, 64, 66, 129, 300):
        for shape in ((classes, rows), (3, classes, rows)):
            x = torch.randn(shape).to(dtype).transpose(-1, -2)
            expected = torchkiln.layer_norm(x.contiguous(), (classes,))
            assert torch.equal(torchkiln.layer_norm(x, (classes,)), expected)
