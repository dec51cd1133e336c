"""The functions that a formula can call: each in C++, in torch, and with its derivatives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Function:
    """A function of one to three arguments."""

    cuda: str
    """C++ expression of the arguments {0}, {1}, {2}, which have type C."""
    torch: Callable[..., Any]
    slopes: tuple[str, ...]
    """The derivative for each argument, as an expression of a, b, c."""
    numbers: bool = False
    """Whether the torch function accepts Python numbers in place of tensors."""
    condition: bool = False
    """Whether the result is a bool, which only ``where`` and ``a if b else c`` take."""

    @property
    def arity(self) -> int:
        """The number of arguments."""
        return len(self.slopes)


def _gelu_tanh(a: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh")


def _quick_gelu(a: Tensor) -> Tensor:
    return a * torch.sigmoid(1.702 * a)


def _relu2(a: Tensor) -> Tensor:
    return torch.square(torch.relu(a))


def _clamp(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.clamp(a, b, c)


# Clamped, because the cube of a large number overflows. Outside, gelu_tanh's derivative is 0 or 1.
_BOUNDED = "clamp(a, -64, 64)"
_SQUARE = f"({_BOUNDED} * {_BOUNDED})"
_INNER = f"({_BOUNDED} * (1.5957691216057308 + 0.07135481627260025 * {_SQUARE}))"
_INNER_SLOPE = f"(1.5957691216057308 + 0.21406444881780074 * {_SQUARE})"
_DENSITY = "(0.3989422804014327 * exp(-0.5 * a * a))"
_MATH = "::torchkiln::{}::template value<Math>({{0}})"

FUNCTIONS = {
    "add": Function("({0} + {1})", torch.add, ("1", "1"), numbers=True),
    "sub": Function("({0} - {1})", torch.sub, ("1", "-1"), numbers=True),
    "mul": Function("({0} * {1})", torch.mul, ("b", "a"), numbers=True),
    "div": Function("({0} / {1})", torch.div, ("1 / b", "-a / (b * b)"), numbers=True),
    "neg": Function("(-{0})", torch.neg, ("-1",)),
    "pow": Function(
        "pow({0}, {1})",
        torch.pow,
        ("where(b == 0, 0, b * pow(a, b - 1))", "where(a == 0, 0, pow(a, b) * log(a))"),
        numbers=True,
    ),
    "lt": Function("({0} < {1})", torch.lt, ("0", "0"), numbers=True, condition=True),
    "le": Function("({0} <= {1})", torch.le, ("0", "0"), numbers=True, condition=True),
    "gt": Function("({0} > {1})", torch.gt, ("0", "0"), numbers=True, condition=True),
    "ge": Function("({0} >= {1})", torch.ge, ("0", "0"), numbers=True, condition=True),
    "eq": Function("({0} == {1})", torch.eq, ("0", "0"), numbers=True, condition=True),
    "ne": Function("({0} != {1})", torch.ne, ("0", "0"), numbers=True, condition=True),
    "where": Function("({0} ? {1} : {2})", torch.where, ("0", "where(a, 1, 0)", "where(a, 0, 1)")),
    "abs": Function("fabs({0})", torch.abs, ("sign(a)",)),
    "sign": Function("::torchkiln::device::sign({0})", torch.sign, ("0",)),
    "floor": Function("floor({0})", torch.floor, ("0",)),
    "minimum": Function(
        "::torchkiln::device::minimum({0}, {1})",
        torch.minimum,
        (
            "where(a == b, 0.5, where(a < b, 1, 0))",
            "where(a == b, 0.5, where(a < b, 0, 1))",
        ),
    ),
    "maximum": Function(
        "::torchkiln::device::maximum({0}, {1})",
        torch.maximum,
        (
            "where(a == b, 0.5, where(a > b, 1, 0))",
            "where(a == b, 0.5, where(a > b, 0, 1))",
        ),
    ),
    "clamp": Function(
        "::torchkiln::device::minimum(::torchkiln::device::maximum({0}, {1}), {2})",
        _clamp,
        (
            "where(a >= b, where(a <= c, 1, 0), 0)",
            "where(b < c, where(a < b, 1, 0), 0)",
            "where(b <= c, where(a > c, 1, 0), 1)",
        ),
    ),
    "sqrt": Function("sqrt({0})", torch.sqrt, ("0.5 / sqrt(a)",)),
    "rsqrt": Function("rsqrt({0})", torch.rsqrt, ("-0.5 * rsqrt(a) / a",)),
    "exp": Function("Math::exp({0})", torch.exp, ("exp(a)",)),
    "expm1": Function("expm1({0})", torch.expm1, ("exp(a)",)),
    "log": Function("log({0})", torch.log, ("1 / a",)),
    "log1p": Function("log1p({0})", torch.log1p, ("1 / (1 + a)",)),
    "sin": Function("sin({0})", torch.sin, ("cos(a)",)),
    "cos": Function("cos({0})", torch.cos, ("-sin(a)",)),
    "erf": Function("erf({0})", torch.erf, ("1.1283791670955126 * exp(-a * a)",)),
    "erfc": Function("erfc({0})", torch.erfc, ("-1.1283791670955126 * exp(-a * a)",)),
    "tanh": Function(_MATH.format("Tanh"), torch.tanh, ("1 - tanh(a) * tanh(a)",)),
    "sigmoid": Function(_MATH.format("Sigmoid"), torch.sigmoid, ("sigmoid(a) * sigmoid(-a)",)),
    "softplus": Function(
        "(::torchkiln::device::maximum({0}, C(0)) + log1p(exp(-fabs({0}))))",
        F.softplus,
        ("sigmoid(a)",),
    ),
    "square": Function("({0} * {0})", torch.square, ("2 * a",)),
    "relu": Function(_MATH.format("Relu"), torch.relu, ("where(a <= 0, 0, 1)",)),
    "relu2": Function(_MATH.format("Relu2"), _relu2, ("2 * relu(a)",)),
    "silu": Function(
        _MATH.format("Silu"), F.silu, ("sigmoid(a) + a * (sigmoid(a) * sigmoid(-a))",)
    ),
    "gelu": Function(
        _MATH.format("Gelu"), F.gelu, (f"0.5 * erfc(-{math.sqrt(0.5)} * a) + a * {_DENSITY}",)
    ),
    "gelu_tanh": Function(
        _MATH.format("GeluTanh"),
        _gelu_tanh,
        (f"sigmoid({_INNER}) + a * ({_INNER_SLOPE} * (sigmoid({_INNER}) * sigmoid(-{_INNER})))",),
    ),
    "quick_gelu": Function(
        _MATH.format("QuickGelu"),
        _quick_gelu,
        ("sigmoid(1.702 * a) + a * (1.702 * (sigmoid(1.702 * a) * sigmoid(-1.702 * a)))",),
    ),
}
OPERATORS = {"add", "sub", "mul", "div", "neg", "lt", "le", "gt", "ge", "eq", "ne"}
"""Functions that expressions write as an operator, not by name."""
ALIASES = {"max": "maximum", "min": "minimum"}
"""Python's names for functions of FUNCTIONS."""
NAMED = tuple(sorted(FUNCTIONS.keys() - OPERATORS))
"""Functions that expressions call by name, without aliases."""
