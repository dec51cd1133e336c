"""Compares values, gradients and layouts of a replacement and of the original forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.patch.plan import Match, Plan
from torchkiln.patch.probe import cast, is_close, numbers, relative_error, run
from torchkiln.patch.report import Replacement

LARGEST_RATIO = 2.0
"""A replacement may have at most this multiple of the original's error."""

SCALES = (1e-3, 1.0, 1e3, 1e5)
"""Magnitudes at which results are compared, as multiples of the usual inputs."""


@dataclass(frozen=True)
class Comparison:
    """Root mean square errors of the old and the new forward, relative to the result's size."""

    dtype: torch.dtype
    was: float
    now: float
    bitwise: bool

    def record(self, row: Replacement) -> None:
        """Store the comparison in a row."""
        row.error_was, row.error_now, row.bitwise = self.was, self.now, self.bitwise
        row.dtype = str(self.dtype).removeprefix("torch.")

    def refusal(self, *, exact: bool) -> str:
        """The reason not to replace the module; empty if there is none."""
        if exact and not self.bitwise:
            return f"not bitwise equal in {str(self.dtype).removeprefix('torch.')}"
        limit = max(LARGEST_RATIO * self.was, torch.finfo(self.dtype).eps / 4)
        return "" if self.now <= limit else f"{self.now:.1e} off, the original {self.was:.1e}"


def compare(match: Match, dtype: torch.dtype, device: torch.device) -> Comparison | str:
    """Runs both forwards on random numbers; returns a reason if one fails or they differ."""
    calls = [(x, *match.others) for x in match.inputs]
    for args in calls:
        for scale in SCALES:
            scaled = (args[0] * scale, *args[1:])
            with torch.no_grad():
                ours = match.plan.forward(match.copy, *scaled)
            if not is_close(run(match.copy, *(x.clone() for x in scaled)), ours):
                return f"its result in float64 is not that of the op, for inputs times {scale:g}"
        if not has_same_gradients(match, args):
            return "its gradients are not those of the op"
        if not all(has_same_layout(match, views) for views in layouts(args)):
            return "its results have other strides than those of the op"
    cast_calls = [tuple(x.to(device, dtype) for x in args) for args in calls]
    return of_calls(cast(match.copy, dtype, device), match.plan, cast_calls, dtype)


def has_same_gradients(match: Match, args: tuple[Tensor, ...]) -> bool:
    """Whether inputs and parameters have the same gradients in float64, in training."""
    module = cast(match.copy, torch.float64, torch.device("cpu"))
    module.__dict__["training"] = True
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.requires_grad_()

    def gradients(forward: Any) -> list[Tensor] | None:
        leaves = [x.clone().requires_grad_() for x in args]
        try:
            with torch.enable_grad():
                y = forward(module, *(x.clone() for x in leaves))
                weight = numbers(*y.shape, seed=99)
                wanted = [*leaves, *parameters]
                found = torch.autograd.grad((y * weight).sum(), wanted, materialize_grads=True)
        except Exception:  # for example, if a result has no gradient
            return None
        return list(found)

    with torch.random.fork_rng([]):
        expected = gradients(type(module).forward)
        found = gradients(match.plan.forward)
    if expected is None or found is None:
        return expected is found
    pairs = zip(found, expected, strict=True)
    return all(is_close(one, other, other.abs().max()) for one, other in pairs if other.numel())


def layouts(args: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """The arguments in other layouts: slices of wider tensors, and transposed dimensions."""
    yield tuple(torch.cat([x, x], -1)[..., : x.shape[-1]] for x in args)
    if args[0].dim() > 2:
        yield tuple(x.mT.contiguous().mT for x in args)
        yield tuple(x.transpose(0, 1) for x in args)


def has_same_layout(match: Match, args: tuple[Tensor, ...]) -> bool:
    """Whether results have the same strides. True for calls that the plan does not fit."""
    if not match.plan.fits(match.copy, *args):
        return True
    was = run(match.copy, *args)
    with torch.no_grad():
        now = match.plan.forward(match.copy, *args)
    return isinstance(was, Tensor) and was.stride() == now.stride()


def of_calls(
    module: nn.Module, plan: Plan, calls: list[tuple[Any, ...]], dtype: torch.dtype
) -> Comparison | str:
    """Runs the old and the new forward on these calls, for a module that has its original class."""
    device = next((x.device for args in calls for x in args if isinstance(x, Tensor)), None)
    truth = cast(module, torch.float64, device or torch.device("cpu"))
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
