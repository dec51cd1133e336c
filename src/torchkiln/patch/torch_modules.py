"""Modules of torch.nn with an op of the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.ops.activation import gelu
from torchkiln.ops.cross_entropy import cross_entropy
from torchkiln.ops.group_norm import group_norm
from torchkiln.ops.matmul import linear
from torchkiln.ops.norm import layer_norm, rms_norm
from torchkiln.ops.softmax import log_softmax, softmax
from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import numbers, random_copy, shallow_copy


def _cross_entropy(m: nn.CrossEntropyLoss, logits: Tensor, target: Tensor) -> Any:
    return cross_entropy(
        logits,
        target,
        m.weight,
        ignore_index=m.ignore_index,
        reduction=m.reduction,
        label_smoothing=m.label_smoothing,
    )


@dataclass(frozen=True)
class Entry:
    """The op of a class of torch."""

    kind: str
    op: str
    forward: Callable[..., Any]


ENTRIES: dict[type[nn.Module], Entry] = {
    nn.LayerNorm: Entry(
        "norm",
        "layer_norm",
        lambda m, x: layer_norm(x, m.normalized_shape, m.weight, m.bias, m.eps),
    ),
    nn.RMSNorm: Entry(
        "norm", "rms_norm", lambda m, x: rms_norm(x, m.normalized_shape, m.weight, m.eps)
    ),
    nn.GroupNorm: Entry(
        "norm", "group_norm", lambda m, x: group_norm(x, m.num_groups, m.weight, m.bias, m.eps)
    ),
    nn.GELU: Entry("activation", "gelu", lambda m, x: gelu(x, m.approximate)),
    nn.Softmax: Entry("softmax", "softmax", lambda m, x: softmax(x, m.dim)),
    nn.LogSoftmax: Entry("softmax", "log_softmax", lambda m, x: log_softmax(x, m.dim)),
    nn.CrossEntropyLoss: Entry("loss", "cross_entropy", _cross_entropy),
    nn.Linear: Entry("linear", "linear", lambda m, x: linear(x, m.weight, m.bias)),
}

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

LEFT: dict[type[nn.Module], str] = {
    nn.Linear: "torch's product is as fast",
    nn.Embedding: "no op of torchkiln",
    nn.Dropout: "no op of torchkiln without a residual",
    nn.Identity: "computes nothing",
}
"""Frequent classes of torch without a replacement, with the reason."""


@dataclass(frozen=True)
class TorchModule(Plan):
    """The op with the attributes of a module of torch."""

    original: type[nn.Module]

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kind of the op."""
        return ENTRIES[self.original].kind

    def __str__(self) -> str:
        return ENTRIES[self.original].op

    def fits(self, module: Any, *args: Any) -> bool:
        """Whether the op takes the call; for a linear layer, whether it gains. Inductor pads."""
        if self.original is not nn.Linear:
            return True
        if torch.compiler.is_compiling() or not is_plain_linear(module):
            return False
        return has_unaligned_rows(module) or sums_gradient(module, *args)

    def forward(self, module: nn.Module, *args: Tensor) -> Any:
        """The op with the attributes of the module."""
        return ENTRIES[self.original].forward(module, *args)


def find(module: nn.Module) -> Match | str | None:
    """The op for a module whose class is exactly one of torch's."""
    original = type(module)
    if original not in ENTRIES or (isinstance(module, nn.Linear) and not may_gain(module)):
        return LEFT.get(original)
    plan = TorchModule(original)
    if isinstance(module, nn.Linear):
        # A smaller layer of the same kind: the values of a large one take long to compare.
        small = nn.Linear(63, 57, bias=module.bias is not None)
        return Match(plan, random_copy(small), (numbers(4, 63),))
    if isinstance(module, nn.CrossEntropyLoss):
        if getattr(module, "reduction", "") not in ("none", "mean", "sum"):
            return "its reduction has no op"
        return Match(plan, shallow_copy(module), ())
    if isinstance(module, (nn.Softmax, nn.LogSoftmax)) and module.dim is None:
        return "dim is None: torch chooses it by the shape of the input"
    shape = getattr(module, "normalized_shape", (64,))
    if isinstance(module, nn.GroupNorm):
        shape = (module.num_channels, 6)
    return Match(plan, random_copy(module), (numbers(4, *shape) * 3,))


def is_plain_linear(module: Any) -> bool:
    """Whether the op takes the parameters of a layer: no quantised ones, for example."""
    tensors = [module.weight] if module.bias is None else [module.weight, module.bias]
    kinds = (nn.Parameter, Tensor)
    return all(
        (type(x) in kinds or type(x).__module__.startswith("torch.distributed"))
        and x.dtype in DTYPES
        and x.shape[0] == module.weight.shape[0]
        for x in tensors
    )


def may_gain(module: Any) -> bool:
    """Whether a layer gains from the op in some calls."""
    gains = module.bias is not None or has_unaligned_rows(module)
    return is_wide(module) and gains and is_plain_linear(module)


def is_wide(module: Any) -> bool:
    """Whether a product with the weight takes long enough to gain from the op."""
    least = 512
    return min(module.weight.shape) >= least


def has_unaligned_rows(module: Any) -> bool:
    """Whether rows of the weight or of its results are no multiples of 16 bytes.

    Products of these are slow in half precision; :func:`torchkiln.linear` pads them.
    """
    lanes = 8
    return any(size % lanes for size in module.weight.shape)


def sums_gradient(module: Any, x: Tensor) -> bool:
    """Whether backward sums many rows for the bias, which takes the op less time.

    Under autocast the op adds a float32 bias in a pass of its own.
    """
    least = 1 << 20
    is_trained = module.bias is not None and module.bias.requires_grad and torch.is_grad_enabled()
    return is_trained and x.numel() >= least and not torch.is_autocast_enabled(x.device.type)
