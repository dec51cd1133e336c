"""The arguments of an elementwise op: tensors and numbers."""

from __future__ import annotations

import ast
import keyword
import math
import re
from dataclasses import dataclass

from torchkiln.jit.formula.parse import parsed

WHERE = "torchkiln.jit.elementwise: arguments"


@dataclass(frozen=True)
class Argument:
    """A tensor, or a number with or without a default."""

    name: str
    is_number: bool
    default: float | None = None

    @property
    def schema(self) -> str:
        """The argument as a torch schema spells it."""
        if not self.is_number:
            return f"Tensor {self.name}"
        return f"float {self.name}" + ("" if self.default is None else f"={self.default!r}")


def is_plain(name: str) -> bool:
    """Whether torch's schemas and C++ accept a name."""
    is_word = keyword.iskeyword(name) or name == "NoneType"
    return name.isascii() and name.isidentifier() and not is_word


def _require_name(name: str) -> None:
    if re.fullmatch(r"grad|result\d+", name):
        raise ValueError(f"kernels use the name {name} themselves")
    if not is_plain(name):
        raise ValueError(f"{name} is no name that torch's schemas and C++ accept")


def read_arguments(text: str) -> list[Argument]:
    """Parses arguments in Python's notation: ``x, bias, scale: float, shift=1.0``."""
    try:
        (function,) = parsed(f"def f({text}): pass").body
        assert isinstance(function, ast.FunctionDef)
        given = function.args
        if given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs:
            raise ValueError("names only")
        first = len(given.args) - len(given.defaults)
        names = [argument.arg for argument in given.args]
        if twice := sorted(name for name in set(names) if names.count(name) > 1):
            raise ValueError(f"two arguments have the name {twice[0]}")
        found = []
        for i, argument in enumerate(given.args):
            _require_name(argument.arg)
            default = None if i < first else float(ast.literal_eval(given.defaults[i - first]))
            if default is not None and not math.isfinite(default):
                raise ValueError(f"the default of {argument.arg} is {default}, not finite")
            kind = "" if argument.annotation is None else ast.unparse(argument.annotation)
            if kind not in ("", "float", "Tensor", "torch.Tensor"):
                raise ValueError(f"the type of {argument.arg} is {kind}, not float or Tensor")
            is_number = default is not None or kind == "float"
            found.append(Argument(argument.arg, is_number, default))
    except (SyntaxError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{WHERE}: got {text!r} ({error}), expected names such as 'x, bias, scale: float,"
            " shift=1.0': a number has the type float or a default, all others are tensors"
        ) from None
    if not any(not argument.is_number for argument in found):
        raise ValueError(f"{WHERE}: got {text!r}, expected at least one tensor")
    return found
