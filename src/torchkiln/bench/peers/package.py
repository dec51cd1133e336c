"""Peers in other packages, used if they are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchkiln.bench.case import BenchCase, Function

Table = Mapping[str, tuple[str, str, Callable[..., Any]]]
"""Module, function and adapter for each op.

An adapter converts the arguments of the op and calls the peer's function with them.
"""


class Refused(Exception):  # noqa: N818 - not an error
    """A peer does not support this call; the message says why."""


def function_of(case: BenchCase, package: str, table: Table) -> Function:
    """The function of ``package`` for the op of ``case``, with the arguments of the op."""
    require_package(case, package)
    module, name, call = table[case.spec.name]
    return partial(call, attrgetter(name)(import_module(module)))


def require_package(case: BenchCase, package: str) -> None:
    """Refuse a package that is not installed, and tensors on the CPU."""
    if find_spec(package) is None:
        raise Refused("not installed")
    if not all(case.sample.args[i].is_cuda for i in case.sample.positions):
        raise Refused("has kernels for GPUs only")


def require_last(normalized_shape: int | Sequence[int]) -> None:
    """Refuse a norm over several dimensions."""
    if not isinstance(normalized_shape, int) and len(normalized_shape) != 1:
        raise Refused("supports norms of the last dimension only")


def softmax_rows(
    x: Tensor, dim: int, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The rows of a softmax over the last dimension, without a scale or a mask."""
    if dim not in (-1, x.ndim - 1):
        raise Refused("supports the last dimension only")
    if scale != 1.0 or mask is not None or causal:
        raise Refused("has neither scale nor mask")
    return x


def rms_norm_of(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor | None, float, float]:
    """Rows, weight, epsilon and offset of an RMS norm of the last dimension."""
    require_last(normalized_shape)
    return x, weight, epsilon(x, eps), offset


def epsilon(x: Tensor, eps: float | None) -> float:
    """``eps``, by default that of our RMS norm: the machine epsilon of its compute dtype."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.finfo(compute).eps if eps is None else eps
