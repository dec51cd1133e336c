"""Helpers of the losses of distributed classes, with all shards in one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchkiln

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no torch.distributed"
)

FORWARD = torch.ops.torchkiln._cross_entropy_shard.default
BACKWARD = torch.ops.torchkiln._cross_entropy_shard_backward.default
LOGPROB = torch.ops.torchkiln._logprob_shard.default
LOGPROB_BACKWARD = torch.ops.torchkiln._logprob_shard_backward.default


def targets(rows: int, classes: int, device: torch.device) -> Tensor:
    """A class for each row; every third row is ignored."""
    target = torch.arange(rows, device=device) * 7919 % classes
    target[1::3] = -1
    return target


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("cuts", [(0, 16, 48), (0, 5, 6, 41, 131), (0, 9000, 17003)])
def test_shards_give_the_loss_and_the_gradient_of_whole_rows(
    device: torch.device, dtype: torch.dtype, smoothing: float, cuts: tuple[int, ...]
) -> None:
    from torchkiln.distributed.class_shards import join  # noqa: PLC0415

    rows, classes = 10, cuts[-1]
    whole = (2 * torch.randn(rows, classes, device=device)).to(dtype).requires_grad_()
    weight = torch.rand(classes, device=device).to(dtype) + 0.1
    target = targets(rows, classes, device)
    for factors in (None, weight):
        expected = torchkiln.cross_entropy(
            whole,
            target,
            factors,
            ignore_index=-1,
            reduction="none",
            label_smoothing=smoothing,
            z_loss=0.01,
            loss_dtype=torch.promote_types(dtype, torch.float32),
        )
        grad = torch.randn_like(expected)
        (of_whole,) = torch.autograd.grad(expected, whole, grad)
        options = (-1, smoothing)
        shards = [
            (whole.detach()[:, a:b], None if factors is None else factors[a:b], a)
            for a, b in itertools.pairwise(cuts)
        ]
        parts = torch.stack([FORWARD(x, target, w, *options, a, classes) for x, w, a in shards])
        joined = join(parts, target == -1, 0.01)
        torch.testing.assert_close(joined.loss, expected)
        found = [
            BACKWARD(grad, x, target, w, joined.state, *options, a, classes) for x, w, a in shards
        ]
        torch.testing.assert_close(torch.cat(found, 1), of_whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("cuts", [(0, 16, 48), (0, 5, 6, 41, 131), (0, 9000, 17003)])
def test_shards_give_the_log_probabilities_of_whole_rows(
    device: torch.device, dtype: torch.dtype, entropy: bool, cuts: tuple[int, ...]
) -> None:
    from torchkiln.distributed.logprob import MOMENT, join  # noqa: PLC0415

    rows, classes = 10, cuts[-1]
    whole = (2 * torch.randn(rows, classes, device=device)).to(dtype)
    whole[2, : cuts[1]] = -torch.inf  # the first shard has no finite logit
    whole[3, : cuts[1]] = torch.finfo(dtype).min / 2  # it adds nothing, with finite logits
    whole.requires_grad_()
    target = targets(rows, classes, device)
    target[2:4] = classes - 1
    both = torchkiln.logprob(whole, target, temperature=0.7, ignore_index=-1, entropy=True)
    grads = [torch.randn_like(y) for y in both]
    if not entropy:
        grads[1].zero_()
    (of_whole,) = torch.autograd.grad(both, whole, grads)
    shards = [(whole.detach()[:, a:b], a) for a, b in itertools.pairwise(cuts)]
    parts = torch.stack([LOGPROB(x, target, 0.7, -1, a, classes) for x, a in shards])
    logp, other, state = join(parts if entropy else parts[:, :MOMENT], target == -1)
    torch.testing.assert_close(logp, both[0])
    torch.testing.assert_close(other, both[1] if entropy else torch.zeros_like(other))
    found = [
        LOGPROB_BACKWARD(grads[0], x, target, grads[1], state, 0.7, -1, a, classes)
        for x, a in shards
    ]
    torch.testing.assert_close(torch.cat(found, 1), of_whole)


def test_the_helpers_of_log_probabilities_are_well_defined_ops(device: torch.device) -> None:
    logits, target = torch.randn(5, 8, device=device), targets(5, 24, device)
    numbers = (0.7, -1, 8, 24)
    rows = target != -1  # results of ignored rows are undefined
    torch.library.opcheck(LOGPROB, (logits[rows], target[rows], *numbers))
    grad, state = torch.randn(5, device=device), torch.rand(3, 5, device=device)
    torch.library.opcheck(LOGPROB_BACKWARD, (grad, logits, target, grad, state, *numbers))
    with pytest.raises(RuntimeError, match="state: got float32"):
        LOGPROB_BACKWARD(grad, logits, target, grad, state[:2], *numbers)


def test_the_helpers_are_well_defined_ops(device: torch.device) -> None:
    logits, target = torch.randn(5, 8, device=device), targets(5, 24, device)
    state, grad = torch.rand(2, 5, device=device), torch.randn(5, device=device)
    forward = (logits, target, torch.rand(8, device=device), -1, 0.1, 8, 24)
    torch.library.opcheck(FORWARD, forward)
    torch.library.opcheck(BACKWARD, (grad, *forward[:3], state, *forward[3:]))
    torch.library.opcheck(BACKWARD, (grad[0], *forward[:3], state, *forward[3:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"first_class": 20},
            "first_class: got 20 for a shard of 8 classes, expected a shard that",
        ),
        ({"first_class": -1}, "first_class: got -1"),
        ({"logits": torch.randn(1, 8, 5)}, "expected [rows, classes] or [classes]"),
        ({"target": torch.randn(5, 8)}, "target: got dtype float32, expected int64"),
    ],
)
def test_bad_calls_of_forward(change: dict[str, object], message: str) -> None:
    call = {"logits": torch.randn(5, 8), "target": targets(5, 24, torch.device("cpu"))}
    if "logits" in change:
        call["target"] = torch.zeros(1, 5, dtype=torch.int64)
    numbers = {"weight": None, "ignore_index": -1, "label_smoothing": 0.0, "first_class": 8}
    with pytest.raises(RuntimeError) as error:
        FORWARD(**(call | numbers | {"all_classes": 24} | change))
    assert message in str(error.value)


def test_bad_calls_of_backward() -> None:
    logits, target = torch.randn(5, 8), targets(5, 24, torch.device("cpu"))
    for grad, state, message in (
        (torch.randn(4), torch.rand(2, 5), "grad: got shape [4], expected [] or that of target"),
        (torch.randn(5), torch.rand(3, 5), "state: got float32 [3, 5], expected contiguous"),
    ):
        with pytest.raises(RuntimeError) as error:
            BACKWARD(grad, logits, target, None, state, -1, 0.0, 8, 24)
        assert message in str(error.value)


def test_a_class_of_no_shard_is_refused() -> None:
    with pytest.raises(IndexError, match="expected one of 24 classes"):
        FORWARD(torch.randn(2, 8), torch.tensor([3, 24]), None, -1, 0.0, 8, 24)
