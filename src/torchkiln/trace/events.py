"""Turns the events of a recording into kernels, other steps and reasons."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchkiln.trace.explanation import KernelLaunch, Step
from torchkiln.trace.kernel_names import access_of, pretty

OURS, COPY, FALLBACK = "torchkiln::", "aten::copy_", "fallback"


@dataclass
class _Tensor:
    device: str
    dtype: str
    memory: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * int(getattr(torch, self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.sizes)}"


@dataclass
class _Frame:
    name: str
    overload: str
    inputs: list[_Tensor]
    has_steps: bool = False
    """Whether the op, or an op that it called, was reported as a step."""
    allocated: int = 0

    @property
    def is_step(self) -> bool:
        """Whether the op itself computes or copies, and does not only call other ops."""
        if not self.name.startswith("aten::"):
            return False
        full = f"{self.name}.{self.overload}" if self.overload else self.name
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        keys = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
        return self.name == COPY or not (self.has_steps and any(has(full, key) for key in keys))


@dataclass
class Recorded:
    """The contents of a recording."""

    route: list[str] = field(default_factory=list)
    steps: list[KernelLaunch | Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    allocated: int = 0


def read(events: Iterable[Any]) -> Recorded:
    """Read the events that ``_C.stop_recording()`` returns."""
    found = Recorded()
    parts: dict[str, list[int]] = defaultdict(list)
    stacks: dict[int, list[_Frame]] = defaultdict(list)
    for kind, thread, text, detail, figures, tensors in events:
        stack = stacks[thread]
        if kind == "enter":
            if text.startswith(OURS):
                found.route.append(text)
            stack.append(_Frame(text, detail, [_Tensor(*t) for t in tensors]))
        elif kind == "leave" and stack:
            frame = stack.pop()
            found.steps += _left(frame, stack, [_Tensor(*t) for t in tensors])
            found.allocated += 0 if stack else frame.allocated
        elif kind == "launch":
            found.steps.append(_launched(text, figures))
        elif kind == "ran":
            if text not in parts:
                found.steps.append(KernelLaunch(text, instruction_set=detail))
            parts[text].append(thread)
        elif kind == "note" and text not in found.notes:
            found.notes.append(text)
    found.steps = [
        replace(step, parts=len(parts[step.name]), workers=len(set(parts[step.name])))
        if isinstance(step, KernelLaunch) and step.name in parts
        else step
        for step in found.steps
    ]
    return found


def _left(frame: _Frame, stack: list[_Frame], outputs: list[_Tensor]) -> Iterator[Step]:
    """The step of an op that has returned, if it is one; ``stack`` has its callers."""
    if frame.name.startswith("aten::empty"):
        frame.allocated = sum(t.bytes for t in outputs)
    elif frame.is_step and not any(f.name == COPY for f in stack):
        ours = [f.name for f in stack if f.name.startswith(OURS)]
        step = _step(frame, outputs, ours[-1] if ours else "")
        if step is not None:
            yield step
            frame.has_steps = True
            if step.kind == FALLBACK:  # the op may allocate without the dispatcher
                known = {t.memory for t in frame.inputs}
                new = sum(t.bytes for t in outputs if t.memory not in known)
                frame.allocated = max(frame.allocated, new)
    if stack:
        stack[-1].has_steps |= frame.has_steps
        stack[-1].allocated += frame.allocated


def _step(frame: _Frame, outputs: list[_Tensor], inside: str) -> Step | None:
    """The step of an op of torch; None for views, which touch no memory."""
    name, inputs = frame.name, frame.inputs
    known = {t.memory for t in inputs}
    is_view = all(t.memory in known for t in outputs) and not name.endswith("_")
    if name == "aten::_local_scalar_dense" and inputs[0].device != "cpu":
        kind, moved, words = "wait", 0, "the host reads a number of the device"
    elif not outputs or is_view or name == "aten::detach_":
        return None
    elif name == COPY and len(inputs) >= 2:
        to, source = inputs[:2]
        moved = to.bytes + source.bytes
        kind, words = "copy", f"{source} of strides {list(source.strides)}"
        if to.dtype != source.dtype:
            kind, words = "cast", f"{source} to {to.dtype}"
        if to.device != source.device:
            kind, words = "transfer", f"{source} from {source.device} to {to.device}"
    elif name in ("aten::fill_", "aten::zero_"):
        kind, moved, words = "fill", outputs[0].bytes, str(outputs[0])
    else:
        kind, moved = FALLBACK, sum(t.bytes for t in [*inputs, *outputs])
        words = ", ".join(map(str, inputs)) or "no tensor"
    return Step(kind, name, inside, moved, words)


def _launched(demangled: str, figures: tuple[int, ...]) -> KernelLaunch:
    """A kernel on a GPU, from its name in C++ and the numbers of its launch."""
    blocks, threads = figures[0:3], figures[3:6]
    cluster, dynamic, static, registers, local, resident, multiprocessors, most = figures[6:]
    name, variant = pretty(demangled)
    access, vector_bytes, items = access_of(demangled)
    count = math.prod(blocks)
    return KernelLaunch(
        name=name or "(no name)",
        variant=variant,
        access=access,
        vector_bytes=vector_bytes,
        items=items,
        blocks=blocks,
        threads=threads,
        cluster=cluster,
        shared_bytes=dynamic + static,
        registers=registers,
        local_bytes=local,
        occupancy=resident * math.prod(threads) / most if most and resident else None,
        waves=count / (resident * multiprocessors) if resident and multiprocessors else None,
    )
