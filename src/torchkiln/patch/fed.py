"""Norms that write float8_e4m3fn, because only products in FP8 read their result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from torchkiln.nn.plain import has_hooks
from torchkiln.ops.norm import (
    add_layer_norm,
    add_layer_norm_fp8,
    add_rms_norm,
    add_rms_norm_fp8,
    layer_norm_fp8,
    rms_norm_fp8,
)
from torchkiln.patch.formula.norm import Norm
from torchkiln.patch.formula.torch_modules import TorchModule
from torchkiln.patch.fp8 import is_quantizable
from torchkiln.patch.plan import Plan, plan_of
from torchkiln.patch.source.layer import read

Place = int | str | None
"""The argument by which a module gets the norm: None for the only one, a position, or a name."""

OPS: dict[str, Callable[..., Any]] = {"rms_norm": rms_norm_fp8, "layer_norm": layer_norm_fp8}
WITH_SUM: dict[tuple[str, bool], Callable[..., Any]] = {
    ("rms_norm", False): add_rms_norm,
    ("rms_norm", True): add_rms_norm_fp8,
    ("layer_norm", False): add_layer_norm,
    ("layer_norm", True): add_layer_norm_fp8,
}
"""The ops by norm, and by whether they write float8_e4m3fn."""


def op_name(plan: Plan) -> str:
    """The name of a plan's op."""
    return str(plan).partition("(")[0]


def arguments(plan: Plan, norm: Any, x: Tensor) -> tuple[Any, dict[str, Any]]:
    """The normalised shape, and the arguments that follow it in a call of the norm's op."""
    if isinstance(plan, Norm):
        return x.shape[-1:], plan.options(norm)
    bias = {"bias": norm.bias} if isinstance(norm, nn.LayerNorm) else {}
    return norm.normalized_shape, {"weight": norm.weight, "eps": norm.eps, **bias}


def added(
    plan: Plan, norm: Any, a: Tensor, b: Tensor, *, quantized: bool = False
) -> tuple[Any, Tensor]:
    """``(norm(a + b), a + b)`` in one op, for a norm with this plan."""
    shape, options = arguments(plan, norm, a)
    found: tuple[Any, Tensor] = WITH_SUM[op_name(plan), quantized](a, b, shape, **options)
    return found


def norm_for(*, norm: Any, x: Any, owner: Any, to: str, at: Place) -> Any:
    """``norm(x)``, in float8_e4m3fn if the owner's module ``to`` reads it so."""
    if feeds(norm, x, owner, to, at) and has_plan(norm, x):
        plan: Any = plan_of(norm)
        shape, options = arguments(plan, norm, x)
        return OPS[op_name(plan)](x, shape, **options)
    return norm(x)


def has_plan(norm: Any, x: Any) -> bool:
    """Whether a norm's plan runs the op for this call, and the norm has no hooks."""
    plan = plan_of(norm)
    return isinstance(plan, (Norm, TorchModule)) and plan.fits(norm, x) and not has_hooks(norm)


def feeds(norm: Any, x: Any, owner: Any, to: str, at: Place) -> bool:
    """Whether a module takes ``quantize(norm(x))`` in place of ``norm(x)``.

    In a graph of ``torch.compile`` the norm is not changed: compiled code may include it in other
    kernels.
    """
    if is_compiling() or not is_quantizable(x) or not x.is_contiguous():
        return False
    if not is_of_rows(norm):
        return False
    reader = read(owner, to)
    plan = plan_of(reader)
    if plan is None or has_hooks(reader) or reader._compiled_call_impl is not None:
        return False
    return type(reader).__call__ is nn.Module.__call__ and plan.takes_quantized(reader, x, at)


def is_of_rows(norm: Any) -> bool:
    """Whether a norm has an op that writes float8_e4m3fn, and is over the last dimension only."""
    plan = plan_of(norm)
    if plan is None or op_name(plan) not in OPS:
        return False
    return isinstance(plan, Norm) or len(norm.normalized_shape) == 1
