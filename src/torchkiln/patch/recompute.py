"""Results that a layer need not save, because backward can compute them again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Saved(NamedTuple):
    """A tensor that backward needs, with its ``_version`` when it was saved."""

    tensor: Tensor
    version: int

    def result(self) -> Tensor:
        """The tensor; torch's error if it was changed in place after it was saved."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: got version {self.tensor._version} of a tensor of shape "
                f"{list(self.tensor.shape)}, expected version {self.version}"
            )
        return self.tensor


def saved(tensor: Tensor) -> Saved:
    """Saves a tensor, detached: its autograd node would be a reference cycle."""
    return Saved(tensor.detach(), tensor._version)


class Source(Protocol):
    """The saved tensors from which backward computes a result again."""

    def result(self) -> Tensor:
        """The result, with the same bits as in forward."""


@dataclass(frozen=True)
class View:
    """A contiguous result in another shape."""

    source: Source
    shape: torch.Size

    def result(self) -> Tensor:
        """The result in this shape."""
        return self.source.result().view(self.shape)


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Properties that a tensor shares with its views of as many elements."""
    return tensor.data_ptr(), tensor._version, tensor.dtype, tensor.numel()


@dataclass(frozen=True)
class Recomputed:
    """A result that the next layer does not save."""

    y: Tensor
    source: Source

    def hooks(self) -> contextlib.AbstractContextManager[object]:
        """The context in which a call of the layer saves the source, not the result."""
        if has_other_hooks():
            return contextlib.nullcontext()
        # The hooks compare the address and keep no tensor, so the result can be freed early.
        source, made, shape, stride = self.source, identity(self.y), self.y.shape, self.y.stride()
        is_contiguous = self.y.is_contiguous()

        def pack(tensor: Tensor) -> Source | View | Saved:
            if identity(tensor) != made:
                return saved(tensor)
            if tensor.shape == shape and tensor.stride() == stride:
                return source
            # a linear layer saves its input as a matrix
            return (
                View(source, tensor.shape)
                if is_contiguous and tensor.is_contiguous()
                else saved(tensor)
            )

        return saved_tensors_hooks(pack, lambda saved: saved.result())


def has_other_hooks() -> bool:
    """Whether other hooks for saved tensors are in use, or torch refuses such hooks."""
    torchs: Any = torch._C._autograd
    enabled = torchs._saved_tensors_hooks_is_enabled()
    return not enabled or torchs._top_saved_tensors_default_hooks(True) is not None
