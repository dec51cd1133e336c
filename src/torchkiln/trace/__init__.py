"""The kernels, copies, casts and fallbacks of one call, recorded while it runs, with reasons."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops.names import ALIASES, OTHER_FUNCTIONS
from torchkiln.patch.compiled.choice import note
from torchkiln.trace.attention import attention_notes
from torchkiln.trace.events import read
from torchkiln.trace.explanation import Explanation, KernelLaunch, Part, Step

if TYPE_CHECKING:
    from torchkiln.testing import OpSpec, Sample

__all__ = ["Explanation", "KernelLaunch", "Part", "Step", "explain"]


def explain(op: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Explanation:
    """Make a call and report its kernels, copies, casts and ops that fell back to torch.

    The call runs, in-place changes included. If an argument requires a gradient, the backward
    follows, with gradients of ones. Only one call at a time can be explained, and kernels that
    other threads launch meanwhile are reported, too.

    Args:
        op: a function such as ``torchkiln.rms_norm``, its name, or any other callable.
        *args: arguments of the call.
        **kwargs: arguments of the call.
    """
    function, spec = _resolve(op)
    tensors = _tensors((args, kwargs))
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    results: list[Tensor] = []
    attention: list[str] = []

    def call() -> None:
        with attention_notes(attention):  # only one at a time, like recordings
            results.extend(_tensors(function(*args, **kwargs)))

    events = _record(call)
    traffic = _traffic(spec, function, args, kwargs)
    plain = sum(t.numel() * t.element_size() for t in [*tensors, *results])
    forward = _part(events, device, *(traffic[0] if traffic else (plain, None)))
    chosen = note(spec.name, tensors) if spec is not None else ""
    forward = replace(forward, notes=(*forward.notes, *attention, *filter(None, [chosen])))
    backward = None
    inputs = [t for t in tensors if t.requires_grad and t.is_leaf]
    wanted = [r for r in results if r.requires_grad]
    if inputs and wanted:
        grads = [torch.ones_like(r) for r in wanted]
        found: list[Tensor] = []

        def run() -> None:
            gradients = torch.autograd.grad(wanted, inputs, grads, allow_unused=True)
            found.extend(_tensors(gradients))

        events = _record(run)
        plain = sum(t.numel() * t.element_size() for t in [*grads, *found])
        backward = _part(events, device, *(traffic[1] if traffic else (plain, None)))
    name = getattr(function, "__name__", type(function).__name__)
    words = tuple(f"{_dtype(t)} {list(t.shape)}{_strides(t)}" for t in tensors)
    return Explanation(name, str(device), words, forward, backward, traffic is not None)


def _resolve(op: Callable[..., Any] | str) -> tuple[Callable[..., Any], OpSpec | None]:
    from torchkiln.testing import SPECS  # noqa: PLC0415

    if isinstance(op, str) and op in OTHER_FUNCTIONS - ALIASES.keys():
        return getattr(sys.modules["torchkiln"], op), None
    if isinstance(op, str):
        from torchkiln.testing.registry import find  # noqa: PLC0415

        spec = find("torchkiln.explain", "op", op)
        return spec.op, spec
    return op, next((spec for spec in SPECS if op in (spec.op, spec.overload)), None)


def _record(call: Callable[[], None]) -> list[Any]:
    _C.start_recording()
    try:
        call()
    finally:
        events = _C.stop_recording()
    return events


def _traffic(
    spec: OpSpec | None, function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Bytes and operations of forward and backward, if the spec can count them, else None."""
    if spec is None:
        return None
    from torchkiln.testing import Sample  # noqa: PLC0415

    sample: Sample = Sample("explained", args, kwargs)
    if function is spec.op:  # passes arguments as the spec's samples do
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        named = spec.typical(torch.device("cpu"), spec.dtypes[0]).kwargs
        positional = tuple(value for name, value in given.items() if name not in named)
        keywords = {name: value for name, value in given.items() if name in named}
        sample = Sample("explained", positional, keywords)
    try:
        there, back = spec.traffic(sample), spec.backward_traffic(sample)
    except (
        AttributeError,
        IndexError,
        TypeError,
        ValueError,
    ):  # the spec does not support these arguments
        return None
    return (there.bytes, there.operations), (back.bytes, back.operations)


def _part(events: Any, device: torch.device, least: int, operations: int | None) -> Part:
    found = read(events)
    return Part(
        tuple(found.route),
        tuple(found.steps),
        tuple(found.notes),
        found.allocated,
        least,
        operations,
        _ceiling(least, device),
    )


def _ceiling(count: int, device: torch.device) -> float | None:
    """Seconds that a copy takes to move ``count`` bytes."""
    from torchkiln.bench.clock import Times, device_clock, in_turns  # noqa: PLC0415
    from torchkiln.bench.roofline import COPY, Work, ceilings  # noqa: PLC0415

    if count == 0:
        return None
    try:
        copy = {COPY: ceilings(Work(count, 0, torch.float32), count, device)[COPY]}
        return Times.of(in_turns(device_clock(device), copy, budget=0.0)[COPY]).seconds
    except torch.OutOfMemoryError:
        return None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _strides(tensor: Tensor) -> str:
    plain = tensor.layout != torch.strided or tensor.is_contiguous()
    return "" if plain else f" of strides {list(tensor.stride())}"
