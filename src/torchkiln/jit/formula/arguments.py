"""The arguments of an elementwise op: tensors and numbers."""

from __future__ import annotations

import ast
from dataclasses import dataclass

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


def read_arguments(text: str) -> list[Argument]:
    """Parses arguments in Python's notation: ``x, bias, scale: float, shift=1.0``."""
    try:
        (function,) = ast.parse(f"def f({text}): pass").body
        assert isinstance(function, ast.FunctionDef)
        given = function.args
        if given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs:
            raise ValueError("names only")
        first = len(given.args) - len(given.defaults)
        found = []
        for i, argument in enumerate(given.args):
            default = None if i < first else float(ast.literal_eval(given.defaults[i - first]))
            kind = "" if argument.annotation is None else ast.unparse(argument.annotation)
            if kind not in ("", "float", "Tensor", "torch.Tensor"):
                raise ValueError(f"the type of {argument.arg} is {kind}, not float or Tensor")
            is_number = default is not None or kind == "float"
            found.append(Argument(argument.arg, is_number, default))
    except (SyntaxError, ValueError, TypeError) as error:
        raise ValueError(
            f"{WHERE}: got {text!r} ({error}), expected names such as 'x, bias, scale: float,"
            " shift=1.0': a number has the type float or a default, all others are tensors"
        ) from None
    if not any(not argument.is_number for argument in found):
        raise ValueError(f"{WHERE}: got {text!r}, expected at least one tensor")
    return found
