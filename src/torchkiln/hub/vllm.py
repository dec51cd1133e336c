"""RMS norms as a provider of vLLM's operators.

vLLM loads :func:`register` as a plug-in of the group ``vllm.general_plugins`` in each of its
processes. The provider is then available, and used where a priority list names it.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchkiln import build_info
from torchkiln.ops.norm import add_rms_norm_
from torchkiln.ops.norm import rms_norm as norm_of_rows

PROVIDER = "torchkiln"
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


# vLLM requires all parameters of its operator, with their names and defaults.
# ruff: noqa: ARG001


def takes_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Whether :func:`rms_norm` computes the result of vLLM's operator for this call."""
    return (
        variance_size is None
        and x.dtype in FLOATING
        and (weight is None or weight.dtype == x.dtype)
    )


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """The norm of the last dimension, also rounded before the weight is applied, as in vLLM."""
    return norm_of_rows(x, x.shape[-1:], weight, epsilon, round="input")


def takes_sum(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    """Whether :func:`fused_add_rms_norm` computes the result of vLLM's operator for this call."""
    return (
        takes_norm(x, weight, epsilon, variance_size)
        and x_residual.dtype == x.dtype
        and x.is_contiguous()
        and x_residual.is_contiguous()
    )


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm of the sum, written into ``x``, and the sum, written into ``x_residual``."""
    return add_rms_norm_(x, x_residual, x.shape[-1:], weight, epsilon, round="input")


def register() -> None:
    """Adds the provider to vLLM's operators; a second call changes nothing.

    vLLM calls this at start and does not catch errors, so nothing is raised: an operator that the
    installed vLLM lacks or refuses is skipped, with a warning.
    """
    for function, takes, inplace in (
        (rms_norm, takes_norm, False),
        (fused_add_rms_norm, takes_sum, True),
    ):
        try:
            _add(function, takes, inplace=inplace)
        except Exception as error:
            logging.getLogger(__name__).warning(
                "torchkiln.hub.vllm: %s: %s: %s", function.__name__, type(error).__name__, error
            )


def _add(function: Callable[..., Any], takes: Callable[..., bool], *, inplace: bool) -> None:
    from vllm import ir  # noqa: PLC0415  an optional package

    op = getattr(ir.ops, function.__name__, None)
    if op is None or PROVIDER in op.impls:
        return
    supported = torch.cuda.is_available() and build_info()["cuda"] is not None
    op.register_impl(PROVIDER, supported=supported, supports_args=takes, inplace=inplace)(function)
