"""The z-loss and the accuracy that linear_cross_entropy returns on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.contract.repeat import threads

ROWS, FEATURES, CLASSES = 8195, 6, 11  # rows of two chunks


def some(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, weight and bias, which require gradients, and classes; every fourth row is ignored."""
    shapes = ((ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    target = torch.randint(CLASSES, (ROWS,), device=device)
    target[3::4] = -100
    return (*leaves, target)


def whole(x: Tensor, matrix: Tensor, target: Tensor, bias: Tensor, **options: Any) -> Any:
    """cross_entropy of all logits at once."""
    temperature = options.pop("temperature", 1.0)
    logits = torch.nn.functional.linear(x, matrix, bias) / temperature
    return torchkiln.cross_entropy(logits, target, **options)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_they_are_those_of_all_logits(device: torch.device, reduction: str, compiled: bool) -> None:
    x, weight, bias, target = some(device)
    options: dict[str, Any] = {"reduction": reduction, "z_loss": 0.1, "temperature": 0.7}
    options["weight"] = torch.rand(CLASSES, device=device) + 0.1

    def call(**wanted: bool) -> Any:
        given: dict[str, Any] = {**options, **wanted}
        return torchkiln.linear_cross_entropy(x, weight, target, linear_bias=bias, **given)

    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    found = call(return_z_loss=True, return_accuracy=True)
    expected = whole(x, weight, target, bias, return_z_loss=True, return_accuracy=True, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not any(each.requires_grad for each in found[1:])
    leaves = (x, weight, bias)
    grads = torch.autograd.grad(found[0].sum(), leaves)
    plain = torch.autograd.grad(call().sum(), leaves)
    assert all(map(torch.equal, grads, plain))
    assert torch.equal(call(return_z_loss=True).z_loss, found[1])
    assert torch.equal(call(return_accuracy=True).accuracy, found[2])


def test_they_exist_without_gradients_and_rows(device: torch.device) -> None:
    x, weight, bias, target = some(device)
    with torch.no_grad():
        found = torchkiln.linear_cross_entropy(
            x, weight, target, linear_bias=bias, return_accuracy=True
        )
        none = torchkiln.linear_cross_entropy(
            x[:0], weight, target[:0], reduction="sum", return_accuracy=True
        )
    expected = whole(x, weight, target, bias, return_accuracy=True)
    for name in ("loss", "accuracy"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name).detach())
        assert getattr(none, name).item() == 0
    assert found.z_loss is none.z_loss is None


def test_the_accuracy_may_be_changed(device: torch.device) -> None:
    """Changing the returned accuracy in place does not change the gradients."""
    x, weight, bias, target = some(device)
    options: dict[str, Any] = {"reduction": "none"}
    loss, _, accuracy = torchkiln.linear_cross_entropy(
        x, weight, target, linear_bias=bias, return_accuracy=True, **options
    )
    assert accuracy is not None
    accuracy.zero_()
    grads = torch.autograd.grad(loss.sum(), (x, weight))
    plain = torchkiln.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)
    assert all(map(torch.equal, grads, torch.autograd.grad(plain.sum(), (x, weight))))


@pytest.mark.parametrize("accuracy", [False, True])
def test_rows_of_any_number_in_a_graph(accuracy: bool) -> None:
    """A graph works for a number of rows that is only known when it runs."""
    x, weight, bias, target = some(torch.device("cpu"))

    def call(x: Tensor, mask: Tensor) -> Any:
        options: dict[str, Any] = {"reduction": "none", "return_accuracy": accuracy}
        found = torchkiln.linear_cross_entropy(
            x[mask], weight, target[mask], linear_bias=bias, **options
        )
        return found[0] if accuracy else found

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        mask = torch.arange(ROWS) % 3 == 0
        (found,) = torch.autograd.grad(compiled(x, mask).sum(), x)
    (expected,) = torch.autograd.grad(call(x, mask).sum(), x)
    torch.testing.assert_close(found, expected)


def test_transforms_and_autocast(device: torch.device) -> None:
    x, weight, bias, target = some(device)
    stacked = torch.stack([x.detach(), -x.detach()])[:, :40]

    def call(x: Tensor) -> Any:
        return torchkiln.linear_cross_entropy(
            x,
            weight,
            target[:40],
            linear_bias=bias,
            z_loss=0.1,
            return_z_loss=True,
            return_accuracy=True,
        )

    found = torch.func.vmap(call)(stacked)
    each = [call(x) for x in stacked]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*each, strict=True))))
    with torch.autocast(device.type, torch.bfloat16):
        output = torchkiln.linear_cross_entropy(x, weight, target, return_accuracy=True)
    assert output.accuracy is not None
    assert output.loss.dtype == output.accuracy.dtype == torch.float32


def test_the_number_of_threads_does_not_matter() -> None:
    given = some(torch.device("cpu"))
    x, weight, bias, target = given
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(
                torchkiln.linear_cross_entropy(
                    x, weight, target, linear_bias=bias, return_accuracy=True
                )
            )
    torch.testing.assert_close(*results)


def test_module(device: torch.device) -> None:
    x, _, _, target = some(device)
    module = torchkiln.nn.LinearCrossEntropyLoss(
        FEATURES, CLASSES, device=device, z_loss=0.1, return_z_loss=True, return_accuracy=True
    )
    expected = torchkiln.linear_cross_entropy(
        x, module.linear.weight, target, z_loss=0.1, return_z_loss=True, return_accuracy=True
    )
    torch.testing.assert_close(module(x, target), expected)
