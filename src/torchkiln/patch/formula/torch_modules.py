"""Modules of torch.nn with an op of the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.nn.plain import attribute
from torchkiln.ops.activation import gelu
from torchkiln.ops.group_norm import group_norm
from torchkiln.ops.norm import layer_norm, rms_norm
from torchkiln.ops.softmax import log_softmax, softmax
from torchkiln.patch.formula.proven import is_dense, is_narrow
from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import numbers, random_copy, shallow_copy
from torchkiln.patch.source.loss_calls import module_loss
from torchkiln.patch.table import stays


@dataclass(frozen=True)
class Entry:
    """The op that replaces a class of torch."""

    kind: str
    op: str
    forward: Callable[..., Any]


def parameters(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a module."""
    return attribute(module, "weight"), attribute(module, "bias")


ENTRIES: dict[type[nn.Module], Entry] = {
    nn.LayerNorm: Entry(
        "norm",
        "layer_norm",
        lambda m, x: layer_norm(x, m.normalized_shape, *parameters(m), m.eps),
    ),
    nn.RMSNorm: Entry(
        "norm",
        "rms_norm",
        lambda m, x: rms_norm(x, m.normalized_shape, attribute(m, "weight"), m.eps),
    ),
    nn.GroupNorm: Entry(
        "norm", "group_norm", lambda m, x: group_norm(x, m.num_groups, *parameters(m), m.eps)
    ),
    nn.GELU: Entry("activation", "gelu", lambda m, x: gelu(x, m.approximate)),
    nn.Softmax: Entry("softmax", "softmax", lambda m, x: softmax(x, m.dim)),
    nn.LogSoftmax: Entry("softmax", "log_softmax", lambda m, x: log_softmax(x, m.dim)),
    nn.CrossEntropyLoss: Entry("loss", "cross_entropy", module_loss),
}

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)

TORCH_OPS = {
    nn.LayerNorm: "aten::layer_norm",
    nn.RMSNorm: "aten::rms_norm",
    nn.GroupNorm: "aten::group_norm",
    nn.Softmax: "aten::softmax.int",
    nn.LogSoftmax: "aten::log_softmax.int",
}
FLOAT32_ON_CUDA = {
    original
    for original, op in TORCH_OPS.items()
    if torch._C._dispatch_has_kernel_for_dispatch_key(op, "AutocastCUDA")
}
"""Modules that autocast on CUDA runs in float32: ``nn.RMSNorm`` not in torch 2.11."""

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

    saved_as = "torch_module"

    original: type[nn.Module]

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kind of replacement, as in the argument ``only``."""
        return ENTRIES[self.original].kind

    def __str__(self) -> str:
        return ENTRIES[self.original].op

    def fits(self, module: Any, *args: Any) -> bool:
        """Whether a norm has parameters of the dtype of x or float32, and a number as eps.

        False under autocast on CUDA for torch's modules that return float32 there.
        """
        if len(args) != 1 or not isinstance(args[0], Tensor):
            return True
        x = args[0]
        if not is_dense(x) or (x.is_cuda and self.original in FLOAT32_ON_CUDA and is_narrow(x)):
            return False
        if self.original not in NORMS:
            return True
        dtype = x.dtype
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype not in (dtype, torch.float32):
                return False
        return type(module.eps) in (float, type(None))

    def stays(self, *args: Any) -> bool:
        """Whether ``torch.compile`` uses the op: yes, unless it was measured to be slower."""
        is_by_class = self.original in (nn.GroupNorm, nn.CrossEntropyLoss)
        return stays(ENTRIES[self.original].op, *args, dim=1 if is_by_class else -1)

    def entry(self) -> Callable[..., Any]:
        """The op as a function of the module and its arguments."""
        return ENTRIES[self.original].forward

    def forward(self, module: nn.Module, *args: Tensor) -> Any:
        """The result of the op with the attributes of the module."""
        return self.entry()(module, *args)


def find(module: nn.Module) -> Match | str | None:
    """The op for a module whose class is exactly one of torch's."""
    original = type(module)
    if original not in ENTRIES:
        return LEFT.get(original)
    plan = TorchModule(original)
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
