"""Peers that are packages: found where they are installed, called as their users call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchkiln.bench.bench_case import BenchCase, Function

Table = Mapping[str, tuple[str, str, Callable[..., Any]]]
"""For each op a module, the name of a function in it, and what makes a call of it.

The last takes the function and then the arguments of the op.
"""


class Refused(Exception):  # noqa: N818 - a peer's choice, not an error
    """A peer does not do this call; the message says why."""


def function_of(case: BenchCase, package: str, table: Table) -> Function:
    """The function of ``package`` for the op of ``case``, with the arguments of the op."""
    if find_spec(package) is None:
        raise Refused("not installed")
    if not all(case.sample.args[i].is_cuda for i in case.sample.positions):
        raise Refused("has kernels for GPUs only")
    module, name, call = table[case.spec.name]
    return partial(call, attrgetter(name)(import_module(module)))


def require_last(normalized_shape: int | Sequence[int]) -> None:
    """Refuse a normalization over several dimensions."""
    if not isinstance(normalized_shape, int) and len(normalized_shape) != 1:
        raise Refused("normalizes the last dimension alone")


def require_plain(x: Tensor, dim: int, scale: float, mask: Tensor | None, causal: bool) -> None:
    """Refuse a softmax over another dimension, of scaled or of masked values."""
    if dim not in (-1, x.ndim - 1):
        raise Refused("takes the last dimension alone")
    if scale != 1.0 or mask is not None or causal:
        raise Refused("has neither scale nor mask")


def epsilon(x: Tensor, eps: float | None) -> float:
    """What our RMS norm takes where none is given: that of the type which it computes in."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.finfo(compute).eps if eps is None else eps
