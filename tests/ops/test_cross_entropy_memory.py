"""Peak memory of cross_entropy, and gradients that overwrite the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cross_entropies import some
from dtypes import every_dtype, name
from torch import Tensor, nn

import torchkiln
from torchkiln.bench.measure import CudaGauge
from torchkiln.testing.compare import bits
from torchkiln.testing.specs import cross_entropy as contract
from torchkiln.testing.specs.cross_entropy import probabilities
from torchkiln.typing import Reduction


def result(logits: Tensor) -> Tensor:
    """The same memory as the result of an operation, since leaves cannot be overwritten."""
    return logits.detach().add_(torch.zeros((), device=logits.device, requires_grad=True))


def gradient(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs, torch.ones_like(loss))


def gradient_again(loss: Tensor, logits: Tensor) -> Tensor:
    """A copy of the gradient; the graph is retained."""
    return torch.autograd.grad(loss, logits, retain_graph=True)[0].clone()


def peak_bytes(device: torch.device, function: Callable[[], object]) -> int:
    """Peak memory of the call, without the memory allocated before."""
    if device.type == "cuda":
        return CudaGauge(device)(function)
    kind = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind], profile_memory=True, acc_events=True) as profile:
        function()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("kind", ["rows", "images", "probabilities", "weighted", "autocast"])
def test_peak_memory(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    """Allocates the gradient and a few numbers per row; with inplace_backward only those."""
    rows, count = 64, 8192
    shape = (4, count, 16) if kind == "images" else (rows, count)
    x = torch.randn(shape, device=device).to(dtype)
    target = torch.randint(count, shape[:1] + shape[2:], device=device)
    if kind == "probabilities":
        target = probabilities(x)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01}
    if kind == "weighted":
        options["weight"] = torch.rand(count, device=device)
    whole = x.numel() * x.itemsize
    little = 64 * rows + (8 * count if kind == "weighted" else 0) + 16 * 512

    def step(inplace: bool) -> None:
        logits = result(x)
        with torch.autocast(device.type, torch.bfloat16, enabled=kind == "autocast"):
            loss = torchkiln.cross_entropy(logits, target, inplace_backward=inplace, **options)
        gradient(loss, logits)

    step(False)
    found = peak_bytes(device, lambda: step(False))
    assert whole <= found <= whole + little
    if kind != "images":
        assert peak_bytes(device, lambda: step(True)) <= little


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_peak_memory_of_a_linear_layer(
    device: torch.device, dtype: torch.dtype, reduction: Reduction
) -> None:
    """A step allocates less than a third of the logits' bytes; a chunk has a fifth of the rows."""
    rows, features, count = 5 * 8192, 4, 1024
    x = torch.randn(rows, features, device=device).to(dtype).requires_grad_()
    weight = torch.randn(count, features, device=device).to(dtype).requires_grad_()
    target = torch.randint(count, (rows,), device=device)

    def step() -> None:
        loss = torchkiln.linear_cross_entropy(x, weight, target, reduction=reduction)
        gradient(loss, x, weight)

    step()
    logits = rows * count * dtype.itemsize
    assert logits / 5 <= peak_bytes(device, step) <= logits / 3


def layouts(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Logits whose memory can take their gradient, each with the whole tensor around them."""
    rows = torch.randn(9, 21, device=device).to(dtype)
    wide = torch.full((9, 32), 77.0, device=device).to(dtype)
    wide[:, 3:24] = rows
    images = torch.randn(2, 3, 5, 7, device=device).to(dtype)
    last = images.contiguous(memory_format=torch.channels_last)
    return {
        "rows": (rows, rows),
        "rows of a wider matrix": (wide[:, 3:24], wide),
        "one row": (rows[1], rows),
        "channels last": (last, last),
        "one class": (rows[:, 2:3], rows),
        "no rows": (rows[:0], rows),
    }


@every_dtype
@pytest.mark.parametrize("kind", list(layouts(torch.device("cpu"), torch.float32)))
def test_in_place(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    """The gradient equals the one of a separate tensor; memory around the logits is not written."""
    logits, whole = layouts(device, dtype)[kind]
    target = contract.classes(logits, -100)
    before = whole.clone()
    leaf = logits.clone().requires_grad_()
    (expected,) = gradient(torchkiln.cross_entropy(leaf, target, reduction="sum", z_loss=0.1), leaf)
    x = result(logits)
    version = x._version
    loss = torchkiln.cross_entropy(x, target, reduction="sum", z_loss=0.1, inplace_backward=True)
    assert torch.equal(x.detach(), leaf.detach())
    (found,) = gradient(loss, x)
    if device.type == "cpu":
        assert torch.equal(bits(found), bits(expected))
    # On a GPU the order of additions depends on the alignment of a row.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=8 * eps, atol=eps)
    assert torch.equal(bits(x.detach()), bits(found))
    if found.numel() > 0:
        assert found.data_ptr() == x.data_ptr()
    assert x._version > version
    with torch.no_grad():
        logits.detach().copy_(leaf.detach())
    assert torch.equal(bits(whole), bits(before))


def test_in_place_needs_rows(device: torch.device) -> None:
    prefix = r"^torchkiln\.cross_entropy: inplace_backward: got logits of shape \[{}\] and strides "
    rows = torch.randn(4, 6, device=device, requires_grad=True) * 1
    for logits in (
        rows.t(),
        rows[:1].expand(4, 6),
        rows[:, ::2],
        rows.as_strided((3, 6), (4, 1)),
        torch.randn(2, 5, 3, device=device, requires_grad=True) * 1,
    ):
        target = torch.zeros(logits.shape[:1] + logits.shape[2:], dtype=torch.int64, device=device)
        words = prefix.format(", ".join(map(str, logits.shape)))
        with pytest.raises(RuntimeError, match=words):
            torchkiln.cross_entropy(logits, target, inplace_backward=True)
        # Without a backward the logits are not overwritten.
        torchkiln.cross_entropy(logits.detach(), target, inplace_backward=True)


def test_in_place_refuses_leaves(device: torch.device) -> None:
    """A leaf is refused, as by torch's in-place ops: the gradient would overwrite a parameter."""
    leaf, target = some(device)
    before = leaf.detach().clone()
    words = (
        r"^torchkiln\.cross_entropy: inplace_backward: got logits that are a leaf, or a view of a"
        " leaf, that requires a gradient, expected the result of an operation"
    )
    for logits in (leaf, leaf[2:], leaf[3], leaf.view(3, 3, 21)[0]):
        rows = target[: logits.shape[0]] if logits.dim() > 1 else target[0]
        with pytest.raises(RuntimeError, match=words):
            torchkiln.cross_entropy(logits, rows, inplace_backward=True)
        with torch.no_grad():
            torchkiln.cross_entropy(logits, rows, inplace_backward=True)
    assert torch.equal(leaf.detach(), before)


def test_in_place_with_packed_logits(device: torch.device) -> None:
    """If a hook has packed the logits, a second backward is correct or raises an error."""
    leaf, target = some(device)
    (expected,) = gradient(torchkiln.cross_entropy(leaf, target), leaf)
    with torch.autograd.graph.save_on_cpu():
        logits = leaf * 1
        losses = [torchkiln.cross_entropy(logits, target, inplace_backward=True) for _ in "ab"]
    torch.testing.assert_close(gradient_again(losses[0], logits), expected)
    for loss in losses:
        if device.type == "cpu":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradient_again(loss, logits)
        else:  # backward reads a copy
            torch.testing.assert_close(gradient_again(loss, logits), expected)


def test_in_place_is_noticed_by_autograd(device: torch.device) -> None:
    """Backward through another use of the overwritten logits raises an error."""
    used = "modified by an inplace operation"
    logits, target = some(device)
    logits = result(logits)
    loss = torchkiln.cross_entropy(logits, target, inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=used):
        loss.backward()

    leaf, target = some(device)
    logits = leaf * 2
    square = logits.square().sum()
    torchkiln.cross_entropy(logits, target, inplace_backward=True).backward()
    with pytest.raises(RuntimeError, match=used):
        square.backward()

    logits = some(device)[0].tanh()
    with pytest.raises(RuntimeError, match=used):
        torchkiln.cross_entropy(logits, target, inplace_backward=True).backward()


def test_in_place_is_not_differentiated_twice(device: torch.device) -> None:
    leaf, target = some(device)
    logits = leaf * 1
    before = logits.detach().clone()
    loss = torchkiln.cross_entropy(logits, target, inplace_backward=True)
    with pytest.raises(
        RuntimeError,
        match=r"^torchkiln\.cross_entropy: inplace_backward: got a backward with create_graph=True",
    ):
        torch.autograd.grad(loss, logits, create_graph=True)
    assert torch.equal(logits.detach(), before)


def test_in_place_with_a_gradient_of_probabilities(device: torch.device) -> None:
    """The gradient of target probabilities is computed before the logits are overwritten."""
    found: list[Tensor] = []
    expected: list[Tensor] = []
    logits, _ = some(device)
    target = probabilities(logits.detach())
    for inplace, grads in ((False, expected), (True, found)):
        inputs = result(logits.detach().clone()), target.clone().requires_grad_()
        loss = torchkiln.cross_entropy(*inputs, inplace_backward=inplace)
        grads.extend(gradient(loss, *inputs))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_in_place_has_memory_of_its_own_where_it_is_traced(device: torch.device) -> None:
    logits, target = some(device)
    before = logits.detach().clone()
    plain = logits.detach().clone().requires_grad_()
    expected = gradient(torchkiln.cross_entropy(plain, target), plain)[0]

    def loss(x: Tensor) -> Tensor:
        return torchkiln.cross_entropy(x, target, inplace_backward=True)

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled(logits), logits)[0], expected)
    torch.testing.assert_close(torch.func.grad(loss)(logits.detach()), expected)
    scaled, two = logits * 1, torch.ones(2, device=device)
    (batched,) = torch.autograd.grad(loss(scaled), scaled, two, is_grads_batched=True)
    torch.testing.assert_close(batched[1], expected)
    assert torch.equal(logits.detach(), before)


def test_training_in_place(device: torch.device) -> None:
    """A training step that overwrites logits equals one with torch's loss."""
    torch.manual_seed(0)
    x = torch.randn(64, 8, device=device)
    y = x[:, :3].argmax(1)
    losses: list[list[float]] = []
    for function in (
        F.cross_entropy,
        torchkiln.nn.CrossEntropyLoss(inplace_backward=True),
    ):
        torch.manual_seed(1)
        layer = nn.Linear(8, 3).to(device)
        optimiser = torch.optim.SGD(layer.parameters(), lr=0.5)
        losses.append([])
        for _ in range(20):
            optimiser.zero_grad()
            loss = function(layer(x), y)
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
