"""Checks of the settings of a new module, with error messages in the form of the ops."""

from typing import Any, TypeVar, get_args

from torch import Tensor

from torchkiln.ops.quantize import Quantized
from torchkiln.typing import Activation, Gate, Precision, Reduction, Rounding, Saved

T = TypeVar("T")
E = TypeVar("E", float, float | None)


def check_word(module: str, argument: str, value: T, words: Any) -> T:
    """Returns the value; refuses values that the ``Literal`` does not list."""
    expected = get_args(words)
    if not isinstance(value, str) or value not in expected:
        raise ValueError(
            f"torchkiln.{module}: {argument}: got {value!r}, expected one of {', '.join(expected)}"
        )
    return value


def check_act(module: str, act: Activation) -> Activation:
    """Returns the name of an activation; refuses other values."""
    return check_word(module, "act", act, Activation)


def check_gate(module: str, act: Gate) -> Gate:
    """Returns the name of the activation of a gate; refuses other values."""
    return check_word(module, "act", act, Gate)


def check_save(module: str, save: Saved) -> Saved:
    """Returns the setting of what is kept for backward; refuses other values."""
    return check_word(module, "save", save, Saved)


def check_precision(module: str, precision: Precision | None) -> Precision | None:
    """Returns the precision of products; refuses other values."""
    return None if precision is None else check_word(module, "precision", precision, Precision)


def check_round(module: str, round: Rounding) -> Rounding:
    """Returns the name of a rounding; refuses other values."""
    return check_word(module, "round", round, Rounding)


def check_reduction(module: str, reduction: Reduction) -> Reduction:
    """Returns the name of a reduction; refuses other values."""
    return check_word(module, "reduction", reduction, Reduction)


def check_eps(module: str, eps: E) -> E:
    """Returns the eps of a norm; refuses negative numbers."""
    given: Any = eps
    if given is not None and not (isinstance(given, (int, float)) and given >= 0):
        raise ValueError(f"torchkiln.{module}: eps: got {eps!r}, expected a number of at least 0")
    return eps


def check_p(module: str, p: float) -> float:
    """Returns a probability; refuses numbers outside of [0, 1]."""
    if not 0 <= p <= 1:
        raise ValueError(f"torchkiln.{module}: p: got {p}, expected a probability between 0 and 1")
    return p


def check_unquantized(module: str, argument: str, x: Tensor | Quantized) -> Tensor:
    """Returns a tensor; refuses a quantised one, for modules that do not multiply in FP8."""
    if isinstance(x, Quantized):
        raise ValueError(
            f"torchkiln.{module}: {argument}: got a Quantized, expected a tensor, or a module with "
            'precision="fp8"'
        )
    return x
