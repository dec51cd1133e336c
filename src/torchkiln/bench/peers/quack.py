"""quack: kernels in CuTe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchkiln.bench.peers.package import Table, rms_norm_of, softmax_rows

PACKAGE = "quack"


def rms_norm(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """RMS norm of the last dimension."""
    x, weight, eps, offset = rms_norm_of(*args, **kwargs)
    return function(x, weight, eps=eps, weight_offset=offset)


def add_rms_norm(
    function: Callable[..., Any], x: Tensor, residual: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """RMS norm of a sum; ``prenorm`` returns both."""
    _, weight, eps, offset = rms_norm_of(x, *args, **kwargs)
    return function(x, weight, residual=residual, eps=eps, prenorm=True, weight_offset=offset)


def softmax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Softmax of rows."""
    return function(softmax_rows(*args, **kwargs))


def cross_entropy(
    function: Callable[..., Any], logits: Tensor, target: Tensor, **kwargs: Any
) -> Any:
    """Cross entropy: the same keywords as ours; others are refused by the call itself."""
    return function(logits, target, **kwargs)


FUNCTIONS: Table = {
    "rms_norm": ("quack", "rmsnorm", rms_norm),
    "add_rms_norm": ("quack", "rmsnorm", add_rms_norm),
    "softmax": ("quack", "softmax", softmax),
    "cross_entropy": ("quack", "cross_entropy", cross_entropy),
}
