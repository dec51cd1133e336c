"""The loss of a language model in the attribute ``loss_function`` of Hugging Face's models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchkiln.ops.cross_entropy import cross_entropy
from torchkiln.patch.formula.recorder import OpNames
from torchkiln.patch.formula.watch import Watch
from torchkiln.patch.probe import numbers
from torchkiln.patch.source.logits import Logits
from torchkiln.patch.source.loss_calls import may_call, names_of

CLASSES = 11


def masked_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """The mean cross-entropy of tokens, in float32, without a float32 copy of the logits.

    Args:
        logits: ``[..., vocab_size]``.
        labels: the classes, of the shape of the logits without the last size.
        vocab_size: the number of classes.
        num_items_in_batch: divides the sum of the losses; None for the number of labels that are
            not ``ignore_index``.
        ignore_index: the label of a token without a loss.
    """
    rows: Any = logits.reshape(-1, vocab_size)
    target = labels.reshape(-1).to(logits.device)
    options: Any = {"reduction": "mean" if num_items_in_batch is None else "sum"}
    options["ignore_index"] = ignore_index
    if isinstance(rows, Logits):
        loss = F.cross_entropy(rows.float(), target, **options)
    else:
        loss = cross_entropy(rows, target, loss_dtype=torch.float32, **options)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """:func:`masked_lm_loss` of each token's logits and the label of the next token.

    Args:
        logits: as for :func:`masked_lm_loss`.
        labels: as for :func:`masked_lm_loss`.
        vocab_size: as for :func:`masked_lm_loss`.
        num_items_in_batch: as for :func:`masked_lm_loss`.
        ignore_index: as for :func:`masked_lm_loss`.
        shift_labels: the labels of the next tokens, if the caller has shifted them.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return masked_lm_loss(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


LOSSES: tuple[Callable[..., Tensor], ...] = (causal_lm_loss, masked_lm_loss)


def find(model: nn.Module) -> Callable[..., Tensor] | str | None:
    """The function that computes the model's ``loss_function``; the reason if there is none."""
    try:
        current: object = model.loss_function
    except AttributeError:
        return None
    if not callable(current):
        return None
    if current in LOSSES:
        return "replaced before"
    if may_call(type(model)) and "loss_function" not in names_of(type(model)):
        return "its forward calls another loss"
    for ours in LOSSES:
        if all(agree(current, ours, options) for options in calls()):
            return ours
    return "its loss is no cross-entropy of tokens"


def calls() -> list[dict[str, Any]]:
    """Options with which the model's function is compared with ours."""
    return [{}, {"num_items_in_batch": 7}, {"ignore_index": 3}]


OPS = frozenset(
    (
        *("_to_copy", "view", "_unsafe_view", "slice", "clone", "constant_pad_nd", "detach"),
        *("alias", "_log_softmax", "nll_loss_forward", "div", "div_", "lift_fresh"),
        "scalar_tensor",
    )
)
"""The ops of a cross-entropy of tokens. A loss that calls others, such as a clamp, is not
replaced."""

CASES = ((1e-3, 130, 3), (4.0, 2, 5), (1e3, 2, 5))
"""Magnitudes of logits, and sizes of labels: a loss may depend on the number of labels."""


def agree(current: Callable[..., Any], ours: Callable[..., Tensor], options: Any) -> bool:
    """Whether both functions compute the same loss of drawn logits, with the same gradients."""
    for scale, *sizes in CASES:
        labels = torch.arange(math.prod(sizes)).reshape(sizes) % CLASSES
        labels[1, 2] = -100 if "ignore_index" not in options else 3
        logits = (numbers(*sizes, CLASSES).float() * scale).requires_grad_()
        expected = ours(logits, labels, CLASSES, **options)
        called = OpNames()
        try:
            with torch.enable_grad(), Watch() as watch, called:
                found = current(logits=logits, labels=labels, vocab_size=CLASSES, **options)
        except Exception:
            return False
        if watch.reason or not called.names <= OPS or not isinstance(found, Tensor):
            return False
        one, other = (torch.autograd.grad(loss, logits)[0] for loss in (found, expected))
        if not torch.allclose(found, expected, rtol=1e-5) or not torch.allclose(one, other):
            return False
    return True
