"""Wide linear layers, whose product or bias gradient the op computes in less time than torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.nn.plain import attribute
from torchkiln.ops.matmul import linear
from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import numbers, random_copy
from torchkiln.patch.table import is_chosen

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

LEAST_SIZE = 512
"""Least number of inputs and of outputs of a wide layer."""

LEAST_INPUT = 1 << 20
"""Elements of an input from which the op's bias gradient takes less time than torch's."""


@dataclass(frozen=True)
class WideLinear(Plan):
    """The plan that runs :func:`torchkiln.linear` for a ``torch.nn.Linear``."""

    kind = "linear"
    saved_as = "linear"
    rounds_alike = False

    def __str__(self) -> str:
        return "linear"

    def fits(self, module: Any, *args: Any) -> bool:
        """Whether the op takes less time; under ``torch.compile`` only by a table."""
        if is_tracing() or len(args) != 1:
            return False
        x = args[0]
        if not is_plain(x) or x.is_meta or plain_parameters(module) is None:
            return False
        if torch.compiler.is_compiling():
            op = "padded_linear" if has_unaligned(module.weight) else "linear"
            if not is_chosen(op, x, module.weight.shape[0], unmeasured=False):
                return False
        return has_unaligned(module.weight) or sums_gradient(module, x)

    def forward(self, module: Any, *args: Any, **_: Any) -> Tensor:
        """The result of :func:`torchkiln.linear`."""
        return linear(args[0], module.weight, module.bias)


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` runs, which compares calls with and without gradients."""
    return torch._C._get_tracing_state() is not None


def is_exporting() -> bool:
    """Whether a program is exported; in older Dynamo, ``is_exporting()`` is always true."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def find(module: Any) -> Match | str | None:
    """The plan of a layer for which the op takes less time in some calls."""
    if type(module) is not nn.Linear or not is_wide(getattr(module, "weight", None)):
        return None
    has_bias = getattr(module, "bias", None) is not None
    if not has_bias and not has_unaligned(module.weight):
        return None
    if plain_parameters(module) is None:
        return "its parameters are no plain tensors"
    # A smaller layer of the same kind, because comparing a large layer takes long.
    small = nn.Linear(63, 57, bias=has_bias, device="meta")
    return Match(WideLinear(), random_copy(small), (numbers(4, 63),))


def is_plain(x: Any) -> bool:
    """Whether ops take a tensor: it is not nested, sparse or quantised, for example."""
    is_known = type(x) in (Tensor, nn.Parameter)
    if not is_known and not type(x).__module__.startswith("torch.distributed"):
        return False
    return x.layout is torch.strided and not x.is_nested and x.dtype in DTYPES


def plain_parameters(module: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a layer, or None if the op does not take them."""
    weight: Any = attribute(module, "weight", None)
    if not is_plain(weight) or weight.dim() != 2:
        return None
    bias: Any = attribute(module, "bias", None)
    if bias is not None and not (is_plain(bias) and bias.shape == weight.shape[:1]):
        return None
    return weight, bias


def is_called_as_usual(weight: Tensor, bias: Tensor | None, x: Any) -> bool:
    """Whether torch's layer takes the input, too: in the dtype of the layer, or under autocast."""
    if not is_plain(x) or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        return False
    if x.device != weight.device:
        return False
    same = x.dtype == weight.dtype and (bias is None or bias.dtype == weight.dtype)
    return same or torch.is_autocast_enabled(x.device.type)


def is_wide(weight: Any) -> bool:
    """Whether both sizes of a weight are at least ``LEAST_SIZE``."""
    return isinstance(weight, Tensor) and weight.dim() == 2 and min(weight.shape) >= LEAST_SIZE


def has_unaligned(weight: Tensor) -> bool:
    """Whether a size of a weight is no multiple of 8 elements, 16 bytes in half precision.

    Such products are slow in half precision; :func:`torchkiln.linear` pads them.
    """
    lanes = 8
    return any(size % lanes for size in weight.shape)


def sums_gradient(module: Any, x: Tensor) -> bool:
    """Whether backward sums many rows for the bias gradient, which the op does in less time.

    Not under autocast, where the op adds a float32 bias in a separate pass.
    """
    is_trained = module.bias is not None and module.bias.requires_grad and torch.is_grad_enabled()
    is_long = x.numel() >= LEAST_INPUT
    return is_trained and is_long and not torch.is_autocast_enabled(x.device.type)
