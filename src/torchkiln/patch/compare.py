"""The error of a replacement beside that of the original forward, both against float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import cast, is_close, relative_error, run

LARGEST_RATIO = 2.0
"""A replacement may have at most this multiple of the original's error."""


@dataclass(frozen=True)
class Comparison:
    """Errors relative to the size of the result, as root mean squares."""

    dtype: torch.dtype
    was: float
    now: float
    bitwise: bool

    @property
    def same(self) -> str:
        """How both results compare, in words."""
        if self.bitwise:
            return f"bitwise in {str(self.dtype).removeprefix('torch.')}"
        if self.now <= self.was:
            return "closer to float64"
        return f"{self.now / self.was:.2f} x the error" if self.was else "other rounding"

    def refusal(self, *, exact: bool) -> str:
        """Why the replacement is not made; empty if it is."""
        if exact and not self.bitwise:
            return f"not bitwise equal in {str(self.dtype).removeprefix('torch.')}"
        limit = max(LARGEST_RATIO * self.was, torch.finfo(self.dtype).eps / 4)
        return "" if self.now <= limit else f"{self.now:.1e} off, the original {self.was:.1e}"


def compare(match: Match, dtype: torch.dtype, device: torch.device) -> Comparison | str:
    """Run both forwards on drawn numbers; the reason if one of them does not run."""
    module = cast(match.copy, dtype, device)
    calls = [(x, *match.others) for x in match.inputs]
    for args in calls:
        with torch.no_grad():
            ours = match.plan.forward(match.copy, *args)
        if not is_close(run(match.copy, *(x.clone() for x in args)), ours):
            return "its result in float64 is not that of the op"
    cast_calls = [tuple(x.to(device, dtype) for x in args) for args in calls]
    return of_calls(module, match.plan, cast_calls, dtype)


def of_calls(
    module: nn.Module, plan: Plan, calls: list[tuple[Any, ...]], dtype: torch.dtype
) -> Comparison | str:
    """Run both forwards of a module whose class is the original one."""
    truth = copy.deepcopy(module).double()
    errors: list[tuple[float, float]] = []
    bitwise = True
    for args in calls:
        was = run(module, *(x.clone() for x in args))
        with torch.no_grad():
            now = plan.forward(module, *args)
            exact = plan.forward(truth, *(x.double() if is_real(x) else x for x in args))
        if not isinstance(was, Tensor):
            return f"forward does not take {dtype}"
        if was.dtype != now.dtype or was.shape != now.shape:
            return f"its result is {was.dtype}, that of the op {now.dtype}"
        bitwise &= torch.equal(was, now)
        errors.append((relative_error(was, exact), relative_error(now, exact)))
    worst_was = max((was for was, _ in errors), default=0.0)
    worst_now = max((now for _, now in errors), default=0.0)
    return Comparison(dtype, worst_was, worst_now, bitwise)


def is_real(x: Any) -> bool:
    """Whether an argument is a tensor of floating-point numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()
