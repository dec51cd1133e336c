"""A call of the layer that makes the logits, computed later in the modes of the call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F


class Kept(NamedTuple):
    """A tensor that is read later, with the number of its changes in place so far."""

    tensor: Tensor
    version: int


def kept(x: Tensor) -> Kept:
    """A tensor with its current number of changes."""
    return Kept(x, version(x))


def check(parts: Iterable[Kept]) -> None:
    """Raises an error if a tensor has changed."""
    if is_compiling():  # the graph contains all changes of the forward
        return
    for x, was in parts:
        if version(x) != was or (x.numel() and not x.untyped_storage().nbytes()):
            raise RuntimeError(
                "torchkiln.replace: logits: got a head or an input that has changed since the "
                "forward, expected none: with head=True logits are computed when they are read; "
                "read them before the optimizer's step, or undo the replacement"
            )


class Call:
    """A call of a head: everything that its result depends on."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.x, self.weight, self.bias = x, weight, bias
        self.parts = [kept(part) for part in (x, weight, bias) if part is not None]
        self.modes = modes_of(x.device.type)
        self.has_loss = False
        """Whether a loss was computed without the logits."""
        self.made: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        cast = self.modes[2]
        return self.x.dtype if cast is None or self.x.dtype == torch.float64 else cast

    def product(self) -> Tensor:
        """The result, computed in the modes of the call, because it may be read in other modes."""
        if self.made is None:
            check(self.parts)
            with within(self.x.device.type, self.modes):
                self.made = F.linear(self.x, self.weight, self.bias)
        return self.made


Modes = tuple[bool, bool, torch.dtype | None]
"""Whether gradients are recorded, whether inference mode is on, and the dtype of autocast."""


def modes_of(kind: str) -> Modes:
    """The current modes, for a kind of device."""
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    is_inference = not is_compiling() and torch.is_inference_mode_enabled()
    return torch.is_grad_enabled(), is_inference, cast


def within(kind: str, modes: Modes) -> AbstractContextManager[None]:
    """A context with these modes, which does nothing if they are on already."""
    return nullcontext() if modes == modes_of(kind) else switched(kind, *modes)


@contextmanager
def switched(
    kind: str, has_grad: bool, is_inference: bool, cast: torch.dtype | None
) -> Iterator[None]:
    """A context that switches to these modes."""
    with (
        torch.inference_mode(is_inference),
        torch.set_grad_enabled(has_grad),
        torch.autocast(kind, dtype=cast, enabled=cast is not None),
    ):
        yield


def version(x: Tensor) -> int:
    """How often a tensor was changed in place."""
    return x._version if is_compiling() or not x.is_inference() else 0
