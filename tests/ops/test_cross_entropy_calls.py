"""cross_entropy: invalid targets, wanted gradients, autocast, threads and graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cross_entropies import gradient, some
from dtypes import every_dtype, name

import torchkiln
from torchkiln.testing.compare import bits
from torchkiln.testing.contract.repeat import threads
from torchkiln.testing.specs.cross_entropy import probabilities


def test_a_target_that_is_no_class_on_the_cpu() -> None:
    """The error names the first invalid target, with and without the check, from any thread."""
    logits = torch.randn(500, 7)
    for place, value in ((0, 7), (250, -1), (499, 2**40)):
        target = torch.randint(7, (500,))
        target[place] = value
        target[499] = min(target[499].item(), value) if place < 499 else value
        words = (
            rf"^torchkiln\.cross_entropy: target: got {value}, expected one of 7 classes, 0 to 6"
        )
        for check in (False, True):
            for count in (1, 3):
                with threads(count), pytest.raises(IndexError, match=words):
                    torchkiln.cross_entropy(logits, target, check_target=check)


def test_the_check_spares_what_is_ignored(device: torch.device) -> None:
    logits, target = some(device)
    target[3] = 255
    loss = torchkiln.cross_entropy(logits, target, ignore_index=255, check_target=True)
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, ignore_index=255))
    with pytest.raises(IndexError, match="got 255, expected one of 21 classes, 0 to 20, or ignore"):
        torchkiln.cross_entropy(logits, target, check_target=True)


def test_only_the_gradients_that_are_wanted(device: torch.device) -> None:
    logits, _ = some(device)
    target = probabilities(logits.detach()).requires_grad_()
    weight = torch.rand(21, device=device)
    loss = torchkiln.cross_entropy(logits.detach(), target, weight=weight, label_smoothing=0.1)
    loss.backward()
    assert logits.grad is None
    plain = target.detach().requires_grad_()
    expected = F.cross_entropy(logits.detach(), plain, weight=weight, label_smoothing=0.1)
    assert target.grad is not None
    torch.testing.assert_close(target.grad, gradient(expected, plain)[0])
    alone = torchkiln.cross_entropy(logits.detach(), target.detach(), weight=weight)
    assert not alone.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_autocast(device: torch.device, dtype: torch.dtype) -> None:
    """Half precision logits have a float32 loss, unless loss_dtype is given; gradients are half."""
    logits, target = some(device)
    half = logits.detach().to(dtype).requires_grad_()
    with torch.autocast(device.type, dtype):
        loss = torchkiln.cross_entropy(half, target)
        assert torchkiln.cross_entropy(half, target, loss_dtype=dtype).dtype == dtype
        assert torchkiln.cross_entropy(logits, target).dtype == torch.float32
        assert torchkiln.cross_entropy(logits.double(), target).dtype == torch.float64
        mixed = torchkiln.cross_entropy(half, probabilities(logits.detach()))
    assert loss.dtype == mixed.dtype == torch.float32
    assert torch.equal(loss, torchkiln.cross_entropy(half, target, loss_dtype=torch.float32))
    assert gradient(loss, half)[0].dtype == dtype
    assert gradient(mixed, half)[0].dtype == dtype
    torch.testing.assert_close(
        mixed, F.cross_entropy(half.detach().float(), probabilities(logits.detach()))
    )


@every_dtype
def test_the_number_of_threads_does_not_matter(dtype: torch.dtype) -> None:
    logits = torch.randn(4000, 33).to(dtype)
    target = torch.randint(33, (4000,))
    for reduction in ("none", "mean", "sum"):
        results = []
        for count in (1, 2, 3):
            with threads(count):
                results.append(bits(torchkiln.cross_entropy(logits, target, reduction=reduction)))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


def test_a_sum_of_many_rows(device: torch.device) -> None:
    """Sums and means of 1,000,003 equal losses are within 5e-7 of float64."""
    rows = 1_000_003
    logits = torch.tensor([[0.0, 1.0, 2.0]], device=device).expand(rows, 3)
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    one = F.cross_entropy(logits[:1].double(), target[:1]).item()
    assert torchkiln.cross_entropy(logits, target).item() == pytest.approx(one, rel=5e-7)
    total = torchkiln.cross_entropy(logits, target, reduction="sum").item()
    assert total == pytest.approx(rows * one, rel=5e-7)
