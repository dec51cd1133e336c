"""Wide linear layers, whose product or bias gradient the op computes in less time than torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from torchkiln.nn.plain import attribute
from torchkiln.ops.matmul import linear
from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import numbers, random_copy
from torchkiln.patch.source.code import with_class_wrapper
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
        return len(args) == 1 and gaining(module, args[0]) is not None

    def forward(self, module: Any, *args: Any, **_: Any) -> Tensor:
        """The result of :func:`torchkiln.linear`."""
        return linear(args[0], module.weight, module.bias)

    def method(self, original: type[nn.Module]) -> Callable[..., Any]:
        """The forward of the class, which reads weight and bias once."""

        @functools.wraps(original.forward, updated=())
        def forward(module: nn.Module, /, *args: Any, **options: Any) -> Any:
            if len(args) == 1 and not options:
                (x,) = args
                found = gaining(module, x)
                if found is not None:
                    return linear(x, *found)
            return original.forward(module, *args, **options)

        return with_class_wrapper(original, forward)


def gaining(module: Any, x: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias, if the op takes less time; under ``torch.compile`` only by a table."""
    own = module._parameters
    # A parametrization computes a weight that is not among the parameters, for example.
    if not is_plain(x) or is_tracing() or "weight" not in own or "bias" not in own:
        return None
    weight, bias = own["weight"], own["bias"]
    if not is_plain(weight) or weight.dim() != 2:
        return None
    is_unaligned = has_unaligned(weight)
    if not is_unaligned and (bias is None or not sums_gradient(bias, x)):
        return None
    if x.is_meta or not is_bias_of(bias, weight) or not is_called_as_usual(weight, bias, x):
        return None
    if is_compiling():
        op = "padded_linear" if is_unaligned else "linear"
        if not is_chosen(op, x, weight.shape[0], unmeasured=False):
            return None
    return weight, bias


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


TORCHS = (Tensor, nn.Parameter)


def is_plain(x: Any) -> bool:
    """Whether ops take a tensor: it is not nested, sparse or quantised, for example."""
    is_known = type(x) in TORCHS
    if not is_known and not type(x).__module__.startswith("torch.distributed"):
        return False
    return x.layout is torch.strided and not x.is_nested and x.dtype in DTYPES


def plain_parameters(module: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a layer, or None if the op does not take them."""
    weight: Any = attribute(module, "weight", None)
    bias: Any = attribute(module, "bias", None)
    is_taken = is_plain(weight) and weight.dim() == 2 and is_bias_of(bias, weight)
    return (weight, bias) if is_taken else None


def is_bias_of(bias: Any, weight: Tensor) -> bool:
    """Whether the op takes a bias, or None, with this weight."""
    return bias is None or (is_plain(bias) and bias.shape == weight.shape[:1])


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
    rows, columns = weight.shape
    lanes = 8
    return bool(rows % lanes or columns % lanes)


def sums_gradient(bias: Any, x: Tensor) -> bool:
    """Whether backward sums many rows for the bias gradient, which the op does in less time.

    Not under autocast, where the op adds a float32 bias in a separate pass.
    """
    is_long = x.numel() >= LEAST_INPUT
    is_trained = is_long and bias.requires_grad and torch.is_grad_enabled()
    return is_trained and not torch.is_autocast_enabled(x.device.type)
