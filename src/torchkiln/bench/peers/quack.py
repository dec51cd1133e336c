"""quack: kernels in CuTe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchkiln.bench.peers.package import Table, epsilon, require_last, require_plain

PACKAGE = "quack"


def rms_norm(
    function: Callable[..., Any],
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
) -> Any:
    """RMS norm of the last dimension."""
    require_last(normalized_shape)
    return function(x, weight, eps=epsilon(x, eps), weight_offset=offset)


def add_rms_norm(  # noqa: PLR0917 - the arguments of the op
    function: Callable[..., Any],
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
) -> Any:
    """RMS norm of a sum; ``prenorm`` returns both."""
    require_last(normalized_shape)
    return function(
        x, weight, residual=residual, eps=epsilon(x, eps), prenorm=True, weight_offset=offset
    )


def softmax(
    function: Callable[..., Any],
    x: Tensor,
    dim: int,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Any:
    """Softmax of rows."""
    require_plain(x, dim, scale, mask, causal)
    return function(x)


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
