"""The z-loss and the accuracy that cross_entropy returns on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cross_entropies import some
from torch import Tensor

import torchkiln
from torchkiln.testing.specs.cross_entropy import probabilities
from torchkiln.typing import Reduction

CPU = torch.device("cpu")


def liked_by_torch(logits: Tensor, target: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """The z-loss with factor 0.1 and the accuracy, computed by torch's ops."""
    rows = logits.movedim(1, -1) if logits.dim() > 2 else logits
    kept = target != -100
    z = 0.1 * rows.float().logsumexp(-1).square() * kept
    correct = (rows.argmax(-1) == target).float() * kept
    if reduction == "none":
        return z, correct
    divisor = kept.sum() if reduction == "mean" else 1
    return z.sum() / divisor, correct.sum() / divisor


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(40, 5), (4, 7, 6)], ids=str)
def test_z_loss_and_accuracy_are_returned_on_request(
    device: torch.device, shape: tuple[int, ...], reduction: Reduction, compiled: bool
) -> None:
    logits = torch.randn(*shape, device=device, requires_grad=True)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
    target.view(-1)[3] = -100
    plain = torchkiln.cross_entropy(logits, target, reduction=reduction, z_loss=0.1)

    def call(**wanted: bool) -> Any:
        options: dict[str, Any] = {"reduction": reduction, "z_loss": 0.1, **wanted}
        return torchkiln.cross_entropy(logits, target, **options)

    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    loss, z, accuracy = call(return_z_loss=True, return_accuracy=True)
    expected = liked_by_torch(logits.detach(), target, reduction)
    torch.testing.assert_close((loss, z, accuracy), (plain, *expected))
    assert not z.requires_grad
    assert not accuracy.requires_grad
    grads = [torch.autograd.grad(y, logits, torch.ones_like(y))[0] for y in (loss, plain)]
    assert torch.equal(*grads)
    only_z, only_accuracy = call(return_z_loss=True), call(return_accuracy=True)
    assert torch.equal(only_z.z_loss, z)
    assert torch.equal(only_accuracy.accuracy, accuracy)
    assert only_z.accuracy is only_accuracy.z_loss is None


def test_accuracy_under_transforms_softcap_and_autocast(device: torch.device) -> None:
    logits, target = some(device)
    stacked = torch.stack([logits.detach(), -logits.detach()])
    for wanted in ({"return_accuracy": True}, {"return_z_loss": True, "softcap": 3.0}):

        def call(x: Tensor, wanted: dict[str, Any] = wanted) -> tuple[Tensor, ...]:
            output = torchkiln.cross_entropy(x, target, z_loss=0.1, **wanted)
            return tuple(part for part in output if part is not None)

        each = list(map(call, stacked))
        found = torch.func.vmap(call)(stacked)
        torch.testing.assert_close(found, tuple(map(torch.stack, zip(*each, strict=True))))
    with torch.autocast(device.type, torch.bfloat16):
        output = torchkiln.cross_entropy(logits.bfloat16(), target, return_accuracy=True)
    assert output.accuracy is not None
    assert output.loss.dtype == output.accuracy.dtype == torch.float32
    with pytest.raises(RuntimeError, match="return_accuracy: got True with a target of prob"):
        torchkiln.cross_entropy(logits, probabilities(logits.detach()), return_accuracy=True)


def test_module_returns_what_was_asked_for(device: torch.device) -> None:
    logits, target = some(device)
    module = torchkiln.nn.CrossEntropyLoss(z_loss=0.1, return_z_loss=True, return_accuracy=True)
    expected = torchkiln.cross_entropy(
        logits, target, z_loss=0.1, return_z_loss=True, return_accuracy=True
    )
    torch.testing.assert_close(module(logits, target), expected)


def test_programs_that_return_the_tuple_are_saved(tmp_path: Path) -> None:
    loss, (logits, target) = torchkiln.nn.CrossEntropyLoss(return_accuracy=True), some(CPU)
    program = torch.export.export(loss, (logits.detach(), target))
    torch.export.save(program, tmp_path / "loss.pt2")
    found = torch.export.load(tmp_path / "loss.pt2").module()(logits.detach(), target)
    assert type(found) is torchkiln.CrossEntropyOutput
    torch.testing.assert_close(found.accuracy, loss(logits, target).accuracy)
