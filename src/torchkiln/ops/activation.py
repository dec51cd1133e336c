"""Activations, each in one pass over memory. Five also exist in place."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from torchkiln import _C
from torchkiln.ops._traced import check_dtype
from torchkiln.ops.eager import eager


@eager(_C.square, input="x")
def square(x: Tensor) -> Tensor:
    """Returns ``x * x``.

    Args:
        x: any shape; float32, float64, float16 or bfloat16. Half precision is computed in float32
            and rounded once. The result has the strides of ``x`` if ``x`` is dense. All of this
            holds for every activation.
    """
    check_dtype("square", "x", x)
    return torch.square(x)


@eager(_C.square_, input="x")
def square_(x: Tensor) -> Tensor:
    """Writes :func:`square` of ``x`` into it and returns it."""
    check_dtype("square_", "x", x)
    return torch.square_(x)


@eager(_C.relu, beside=("inplace",), input="x")
def relu(x: Tensor, inplace: bool = False) -> Tensor:
    """Returns ``max(x, 0)``, of any shape; NaN stays NaN.

    Args:
        x: any shape.
        inplace: whether ``x`` is overwritten, as by :func:`relu_`.
    """
    if inplace:
        return relu_(x)
    check_dtype("relu", "x", x)
    return torch.relu(x)


@eager(_C.relu_, input="x")
def relu_(x: Tensor) -> Tensor:
    """Writes :func:`relu` of ``x`` into it and returns it."""
    check_dtype("relu_", "x", x)
    return torch.relu_(x)


@eager(_C.relu2, input="x")
def relu2(x: Tensor) -> Tensor:
    """Returns ``max(x, 0)**2``, of any shape; NaN stays NaN."""
    check_dtype("relu2", "x", x)
    return torch.square(torch.relu(x))


@eager(_C.gelu, beside=("approximate",), input="x")
def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Returns ``x * F(x)``, of any shape, where ``F`` is the cumulative normal distribution.

    Args:
        x: any shape.
        approximate: ``"none"``, or ``"tanh"`` for :func:`gelu_tanh`.
    """
    if approximate == "tanh":
        return gelu_tanh(x)
    is_tanh(approximate, "gelu")
    check_dtype("gelu", "x", x)
    return F.gelu(x)


@eager(_C.gelu_tanh, input="x")
def gelu_tanh(x: Tensor) -> Tensor:
    """Returns ``x * (1 + tanh(u)) / 2`` with ``u = sqrt(2 / pi) * (x + 0.044715 * x**3)``.

    Args:
        x: any shape.
    """
    check_dtype("gelu_tanh", "x", x)
    return F.gelu(x, approximate="tanh")


@eager(_C.quick_gelu, input="x")
def quick_gelu(x: Tensor) -> Tensor:
    """Returns ``x / (1 + exp(-1.702 * x))``, of any shape."""
    check_dtype("quick_gelu", "x", x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


@eager(_C.silu, beside=("inplace",), input="x")
def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """Returns ``x / (1 + exp(-x))``, of any shape.

    Args:
        x: any shape.
        inplace: whether ``x`` is overwritten, as by :func:`silu_`.
    """
    if inplace:
        return silu_(x)
    check_dtype("silu", "x", x)
    return F.silu(x)


@eager(_C.silu_, input="x")
def silu_(x: Tensor) -> Tensor:
    """Writes :func:`silu` of ``x`` into it and returns it."""
    check_dtype("silu_", "x", x)
    return F.silu(x, inplace=True)


@eager(_C.sigmoid, input="x")
def sigmoid(x: Tensor) -> Tensor:
    """Returns ``1 / (1 + exp(-x))``, of any shape."""
    check_dtype("sigmoid", "x", x)
    return torch.sigmoid(x)


@eager(_C.sigmoid_, input="x")
def sigmoid_(x: Tensor) -> Tensor:
    """Writes :func:`sigmoid` of ``x`` into it and returns it."""
    check_dtype("sigmoid_", "x", x)
    return torch.sigmoid_(x)


@eager(_C.tanh, input="x")
def tanh(x: Tensor) -> Tensor:
    """Returns the hyperbolic tangent of ``x``, of any shape."""
    check_dtype("tanh", "x", x)
    return torch.tanh(x)


@eager(_C.tanh_, input="x")
def tanh_(x: Tensor) -> Tensor:
    """Writes :func:`tanh` of ``x`` into it and returns it."""
    check_dtype("tanh_", "x", x)
    return torch.tanh_(x)


def is_tanh(approximate: Literal["none", "tanh"], op: str) -> bool:
    """Whether an argument ``approximate`` names the tanh approximation of gelu."""
    if approximate not in ("none", "tanh"):
        raise RuntimeError(
            f"torchkiln.{op}: approximate: got {approximate!r}, expected 'none' or 'tanh'"
        )
    return approximate == "tanh"


def listed(suffix: str = "") -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions of this module for the activations that C++ lists, by activation name."""
    names = [name for name in _C.activations() if name + suffix in globals()]
    return {name: globals()[name + suffix] for name in names}


ACTIVATIONS = listed()
"""The functions of all activations except ``"none"``."""
IN_PLACE = listed("_")
"""The in-place functions of activations that have one, by activation name."""
