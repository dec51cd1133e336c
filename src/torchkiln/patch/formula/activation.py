"""Activations without parameters, found on a grid of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchkiln.ops.activation import gelu, quick_gelu, relu, relu2, sigmoid, silu, tanh
from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import is_close, run, shallow_copy

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu,
    "silu": silu,
    "relu2": relu2,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, "tanh"),
    "quick_gelu": quick_gelu,
    "sigmoid": sigmoid,
    "tanh": tanh,
}

EQUAL = {"relu", "silu", "sigmoid", "tanh"}
"""Ops for which torch has one kernel of the same speed."""


@dataclass(frozen=True)
class Activation(Plan):
    """One elementwise op."""

    kind = "activation"
    op: str

    def __str__(self) -> str:
        return self.op

    def forward(self, _: nn.Module, x: Tensor) -> Tensor:
        """The op."""
        return OPS[self.op](x)


class Count(TorchDispatchMode):
    """Counts the ATen ops of a call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ops += 1
        return func(*args, **kwargs or {})


def grid() -> Tensor:
    """Both tails and the middle, in float64."""
    return torch.linspace(-12, 12, 4097, dtype=torch.float64)


class Computed(NamedTuple):
    """An activation that a copy of a module computes."""

    name: str
    ops: int
    """ATen ops of a call."""
    copy: nn.Module
    x: Tensor


def computed(module: nn.Module) -> Computed | None:
    """The activation that a leaf without parameters computes, also in training."""
    if any(True for _ in module.children()) or any(True for _ in module.parameters()):
        return None
    copy = shallow_copy(module)
    x = grid()
    overwritable = x.clone()
    with Count() as count:
        result = run(copy, overwritable)
    copy.training = True
    trained = run(copy, x.clone())
    copy.training = False
    for name, op in OPS.items():
        if all(is_close(one, op(x), x.abs()) for one in (result, trained)):
            return Computed(name, count.ops, copy, x)
    return None


def find(module: nn.Module) -> Match | str | None:
    """The plan for an activation that torch has no kernel of the same speed for."""
    found = computed(module)
    if found is None:
        return None
    if found.ops == 1 and found.name in EQUAL:
        return f"torch's {found.name} is one kernel of the same speed"
    return Match(Activation(found.name), found.copy, (found.x,))
