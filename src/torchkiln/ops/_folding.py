"""Batch norms folded into the convolution before them, kept until something changes.

A fold belongs to a batch norm, or to the weight of a convolution, and is freed with this owner. No
module contains it: copies, pickles and ``state_dict`` leave it out.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from torchkiln import _C
from torchkiln.ops._after_steps import call_after_steps

PLAIN = (Tensor, nn.Parameter)
"""Classes of tensors that add no code to torch's operations."""


class Parts(NamedTuple):
    """The tensors of a convolution and of the batch norm behind it."""

    weight: Tensor
    """The weight of the convolution, ``[out_channels, in_channels / groups, ...]``."""
    bias: Tensor | None
    bn_weight: Tensor | None
    bn_bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor


class Form(NamedTuple):
    """The settings that a fold depends on, apart from its parts."""

    eps: float
    dtype: torch.dtype
    memory_format: torch.memory_format


def watched(owner: object, parts: Parts) -> tuple[Tensor | None, ...]:
    """The tensors whose change ends a fold.

    torch's batch norm writes its statistics in training without a change of their versions, but
    counts its batches, and the counter has a version.
    """
    buffers = owner._buffers if isinstance(owner, nn.Module) else {}
    return (*parts, buffers.get("num_batches_tracked"))


class Fold:
    """Weight and bias of a convolution that includes the batch norm after it."""

    def __init__(self, owner: object, parts: Parts, form: Form) -> None:
        self.form = form
        self.watch = _C.Watch(watched(owner, parts))
        self.ids = {id(part) for part in parts}
        self.weight, self.bias = folded(parts, form)
        self.stream = stream_of(self.weight)
        if self.stream is not None:  # calls on other streams read the fold, too
            torch.cuda.current_stream(self.weight.device).synchronize()
        self.refused: str | None = None
        """The reason why cuDNN has no kernel for this fold, if it has none."""
        self.last: tuple[Any, Any, str] = (None, None, "")
        """The signature, route and note of the last call. One tuple, because threads may share a
        fold."""

    def is_used(self) -> None:
        """Keeps the memory of the fold until the current stream has finished its work."""
        if self.stream is not None and self.stream != stream_of(self.weight):
            stream = torch.cuda.current_stream(self.weight.device)
            self.weight.record_stream(stream)
            self.bias.record_stream(stream)


FOLDS: dict[int, tuple[weakref.ref[Any], Fold]] = {}
"""The fold of each owner, by the owner's id."""


def kept_fold(owner: object, parts: Parts) -> Fold | None:
    """The owner's fold; None if it has none, or if a folded tensor has changed since."""
    entry = FOLDS.get(id(owner))
    if entry is None or not entry[1].watch.is_current(watched(owner, parts)):
        return None
    return entry[1]


def fold_of(owner: object, parts: Parts, form: Form) -> Fold | str:
    """The owner's fold of these tensors, or a new fold, or the reason why they cannot be folded."""
    kept = kept_fold(owner, parts)
    if kept is not None and kept.form == form:
        return kept
    why = why_not_ever(parts, form.dtype)
    if why is not None:
        return why
    key = id(owner)
    FOLDS.pop(key, None)  # frees the memory before it is needed again
    fold = Fold(owner, parts, form)
    _C.note("the batch norm is folded in this call, and the fold kept for others")
    FOLDS[key] = weakref.ref(owner, lambda _: FOLDS.pop(key, None)), fold
    watch_optimizers()
    return fold


@functools.cache
def watch_optimizers() -> None:
    """Have every optimizer drop the folds of its parameters."""
    call_after_steps(forget_parameters)


def forget_parameters(changed: set[int]) -> None:
    """Drop the folds of the parameters with these ids."""
    for key, entry in list(FOLDS.items()):
        if not changed.isdisjoint(entry[1].ids):
            FOLDS.pop(key, None)


def forget(owner: object) -> None:
    """Drop the fold of an owner."""
    FOLDS.pop(id(owner), None)


def folded(parts: Parts, form: Form) -> tuple[Tensor, Tensor]:
    """``weight * scale`` and ``bn_bias + (bias - mean) * scale``, rounded once."""
    compute = torch.promote_types(parts.weight.dtype, torch.float32)
    with torch.inference_mode(mode=False), torch.no_grad():
        scale = (parts.running_var.to(compute) + form.eps).rsqrt()
        if parts.bn_weight is not None:
            scale *= parts.bn_weight
        shift = -parts.running_mean.to(compute)
        if parts.bias is not None:
            shift += parts.bias
        shift *= scale
        if parts.bn_bias is not None:
            shift += parts.bn_bias
        wide = scale.view(-1, *[1] * (parts.weight.dim() - 1))
        weight = (parts.weight.to(compute) * wide).to(form.dtype)
        return weight.contiguous(memory_format=form.memory_format), shift.to(form.dtype)


def why_not_now(owner: object, x: Tensor, parts: Parts, residual: Tensor | None) -> str | None:
    """The reason not to use a fold in this call, if any.

    A fold is a copy of the parameters, so it is used only where every change of a parameter is
    detected. A call that needs gradients precedes a change, and drops the fold.
    """
    if _C.needs_gradient((x, residual, *parts)):
        forget(owner)
        return "gradients are needed"
    if is_transformed():
        return "torch transforms or records the call"
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured, which must read the parameters"
    return None


def why_not_ever(parts: Parts, dtype: torch.dtype) -> str | None:
    """The reason not to fold these tensors, if any."""
    if type(parts.weight) is not nn.Parameter:
        return "the weight is no torch.nn.Parameter"
    for part in parts:
        if part is not None and type(part) not in PLAIN:
            return "a tensor is of a subclass"
        if part is not None and part.is_inference():
            return "changes of tensors made in inference mode are not counted"
    return None if are_right(parts, dtype) else "shapes, dtypes or devices do not agree"


def are_right(parts: Parts, dtype: torch.dtype) -> bool:
    """Whether the convolution and bn_act take these tensors; those ops raise the errors."""
    weight, bias, *pairs = parts
    dtypes = [{part.dtype for part in pair if part is not None} for pair in (pairs[:2], pairs[2:])]
    return all(
        part is None or (part.shape == weight.shape[:1] and part.device == weight.device)
        for part in parts[1:]
    ) and (
        (bias is None or bias.dtype == weight.dtype)
        and all(len(found) <= 1 and found <= {dtype, torch.float32} for found in dtypes)
    )


def stream_of(tensor: Tensor) -> int | None:
    """The current stream of a tensor's GPU."""
    if not tensor.is_cuda:
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(tensor.device.index)
    return stream


def is_transformed() -> bool:
    """Whether torch transforms or records calls: vmap, dual tensors, dispatch modes, tracing."""
    return bool(
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )
