"""Norms over the last dimension, found by their formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchkiln.ops.norm import layer_norm, rms_norm
from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import cast, is_close, numbers, random_copy, run

EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)
"""Values to try for a module without an attribute that holds eps."""

CHANGED_EPS = 0.5
"""Shows that an attribute is eps: the result has to follow it."""

LARGEST_EPS = 1e-2

P = TypeVar("P", bound=Any)
"""A plan with a field eps."""


@dataclass(frozen=True)
class Norm(Plan):
    """``rms_norm`` or ``layer_norm`` with the parameters and the eps of the module."""

    kind = "norm"
    op: str
    weight: str | None
    bias: str | None
    eps: str | float
    """The name of the attribute, or the number."""
    offset: float = 0.0
    round: str = "once"

    def __str__(self) -> str:
        said = [f"offset={self.offset:g}"] if self.offset else []
        said += [f"round={self.round}"] if self.round != "once" else []
        return f"{self.op}({', '.join(said)})" if said else self.op

    def fits(self, module: nn.Module, *args: Tensor) -> bool:
        """Whether x and the weight have one dtype: the dtype of other results differs by module."""
        if len(args) != 1:
            return False
        return self.weight is None or getattr(module, self.weight).dtype == args[0].dtype

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        """The op with the parameters of the module."""
        op = rms_norm if self.op == "rms_norm" else layer_norm
        return op(x, x.shape[-1:], **self.options(module))

    def options(self, module: nn.Module) -> dict[str, Any]:
        """The arguments of the op behind the sizes of a row."""
        options: dict[str, Any] = {"offset": self.offset, "round": self.round}
        options["eps"] = getattr(module, self.eps) if isinstance(self.eps, str) else self.eps
        options["weight"] = None if self.weight is None else getattr(module, self.weight)
        if self.bias is not None:
            options["bias"] = getattr(module, self.bias)
        return options


def inputs(columns: int) -> Tensor:
    """Rows of all magnitudes that show eps, beside usual ones and some with a large mean."""
    scale = torch.tensor([1.0, 1.0, 30.0, 1e-2, 1e-3, 1e-4, 1e-6], dtype=torch.float64)
    mean = torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    return numbers(2, len(scale), columns) * scale[:, None] + mean[:, None]


def eps_of(module: nn.Module) -> list[tuple[str | float, float]]:
    """Possible eps: attributes first, then numbers."""
    attributes = {
        name: value
        for name, value in vars(module).items()
        if type(value) is float and 0 <= value <= LARGEST_EPS
    }
    return [*attributes.items(), *((value, value) for value in EPS)]


def vectors_of(module: nn.Module) -> list[str] | None:
    """The parameters of a leaf that has up to two vectors of one size, and no buffer."""
    parameters = dict(module.named_parameters(recurse=False))
    vectors = [name for name, value in parameters.items() if value.dim() == 1]
    if next(module.children(), None) is not None or len(vectors) != len(parameters):
        return None
    if next(module.buffers(recurse=False), None) is not None or len(vectors) > 2:
        return None
    return vectors if len({parameters[name].shape[0] for name in vectors}) <= 1 else None


def find(module: nn.Module) -> Match | str | None:
    """The norm that a leaf with at most a weight and a bias computes."""
    vectors = vectors_of(module)
    if vectors is None:
        return None
    copy = random_copy(module)
    x = inputs(getattr(copy, vectors[0]).shape[0] if vectors else 64)
    result = run(copy, x)
    if not isinstance(result, Tensor) or result.shape != x.shape:
        return None
    for eps, value in eps_of(module):
        for op, offset, names in product(
            ("rms_norm", "layer_norm"), (0.0, 1.0), {tuple(vectors), tuple(vectors[::-1])}
        ):
            weight, bias = (*names, None, None)[:2]
            if (op == "rms_norm") == (bias is not None):
                continue
            plan = Norm(op, weight, bias, value, offset)
            if is_close(result, plan.forward(copy, x)):
                plan = with_rounding(with_eps(plan, copy, eps, x), copy, x)
                return Match(plan, copy, (x,))
    return None


def with_eps(plan: P, copy: nn.Module, eps: str | float, *args: Tensor) -> P:
    """The plan that reads eps from the attribute, if the module reads it from there, too."""
    if not isinstance(eps, str):
        return plan
    before = getattr(copy, eps)
    setattr(copy, eps, CHANGED_EPS)
    named = replace(plan, eps=eps)
    result = run(copy, *args)
    follows = is_close(result, named.forward(copy, *args))
    setattr(copy, eps, before)
    return named if follows else plan


def with_rounding(plan: Norm, copy: nn.Module, x: Tensor) -> Norm:
    """The plan whose results in bfloat16 differ from those of the module in the fewest elements."""
    module, x = cast(copy, torch.bfloat16, x.device), x.bfloat16()
    result = run(module, x)
    if not isinstance(result, Tensor) or result.dtype != x.dtype:
        return plan

    def others(plan: Norm) -> int:
        return int((plan.forward(module, x) != result).sum())

    return min(plan, replace(plan, round="input"), key=others)
