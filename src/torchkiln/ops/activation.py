"""Activations, each one pass over memory; some in place, too."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.overrides import has_torch_function_unary

from torchkiln import _C


def _detour(x: Tensor, expression: Callable[..., Tensor], op: str) -> Tensor:
    """What a graph is made of, which is torch's own, and what a tensor subclass sees."""
    if is_compiling():
        return expression(x)
    overload = getattr(torch.ops.torchkiln, op).default
    result: Tensor = overload(x)
    return result


def square(x: Tensor) -> Tensor:
    """Returns ``x * x``.

    Args:
        x: any shape; float32, float64, float16 or bfloat16, as for every function here. A half
            precision is computed in float32 and rounded once. The result keeps the layout of a
            dense ``x``.
    """
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, torch.square, "square")
    return _C.square(x)


def square_(x: Tensor) -> Tensor:
    """Writes :func:`square` of ``x`` into it and returns it."""
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, torch.square_, "square_")
    return _C.square_(x)


def relu(x: Tensor) -> Tensor:
    """Returns ``max(x, 0)``, of any shape; NaN stays NaN."""
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, torch.relu, "relu")
    return _C.relu(x)


def relu_(x: Tensor) -> Tensor:
    """Writes :func:`relu` of ``x`` into it and returns it."""
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, torch.relu_, "relu_")
    return _C.relu_(x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Returns ``x * F(x)``, of any shape, where ``F`` is the cumulative normal distribution.

    Args:
        x: any shape.
        approximate: ``"none"``, or ``"tanh"`` for :func:`gelu_tanh`.
    """
    if is_tanh(approximate, "gelu"):
        return gelu_tanh(x)
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, F.gelu, "gelu")
    return _C.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns ``x * (1 + tanh(u)) / 2`` with ``u = sqrt(2 / pi) * (x + 0.044715 * x**3)``.

    Args:
        x: any shape.
    """
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, _gelu_tanh, "gelu_tanh")
    return _C.gelu_tanh(x)


def silu(x: Tensor) -> Tensor:
    """Returns ``x / (1 + exp(-x))``, of any shape."""
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, F.silu, "silu")
    return _C.silu(x)


def silu_(x: Tensor) -> Tensor:
    """Writes :func:`silu` of ``x`` into it and returns it."""
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, _silu_, "silu_")
    return _C.silu_(x)


def sigmoid(x: Tensor) -> Tensor:
    """Returns ``1 / (1 + exp(-x))``, of any shape."""
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, torch.sigmoid, "sigmoid")
    return _C.sigmoid(x)


def sigmoid_(x: Tensor) -> Tensor:
    """Writes :func:`sigmoid` of ``x`` into it and returns it."""
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, torch.sigmoid_, "sigmoid_")
    return _C.sigmoid_(x)


def tanh(x: Tensor) -> Tensor:
    """Returns the hyperbolic tangent of ``x``, of any shape."""
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, torch.tanh, "tanh")
    return _C.tanh(x)


def tanh_(x: Tensor) -> Tensor:
    """Writes :func:`tanh` of ``x`` into it and returns it."""
    if is_compiling() or has_torch_function_unary(x):
        return _detour(x, torch.tanh_, "tanh_")
    return _C.tanh_(x)


def is_tanh(approximate: str, op: str) -> bool:
    """Whether gelu's approximation is asked for."""
    if approximate not in ("none", "tanh"):
        raise RuntimeError(
            f"torchkiln.{op}: approximate: got {approximate!r}, expected 'none' or 'tanh'"
        )
    return approximate == "tanh"


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _silu_(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)
