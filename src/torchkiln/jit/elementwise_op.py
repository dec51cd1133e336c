"""Ops of one formula: forward and backward are one kernel each, whatever the shapes."""

from __future__ import annotations

import ast
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.jit.call.arguments import dtype_name
from torchkiln.jit.call.layout import broadcast
from torchkiln.jit.compile.includes import included
from torchkiln.jit.compile.toolkit import torchkiln_include
from torchkiln.jit.custom_op import Op
from torchkiln.jit.formula.expression import Name, Node, call, cuda_of, names_in, parse, slope
from torchkiln.jit.formula.formula import CUDA_TYPES, Formula
from torchkiln.jit.formula.reference import GRAD, reference_of, with_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchkiln.testing import OpSpec


@dataclass(frozen=True)
class Argument:
    """A tensor, or a number with or without a default."""

    name: str
    is_number: bool
    default: float | None = None

    @property
    def schema(self) -> str:
        """As a schema of torch has it."""
        if not self.is_number:
            return f"Tensor {self.name}"
        return f"float {self.name}" + ("" if self.default is None else f"={self.default!r}")


def read_arguments(text: str) -> list[Argument]:
    """Arguments as Python writes them: ``x, bias, scale: float, shift=1.0``."""
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
                raise ValueError(f"{kind} is no type of an argument")
            is_number = default is not None or kind == "float"
            found.append(Argument(argument.arg, is_number, default))
    except (SyntaxError, ValueError, TypeError) as error:
        raise ValueError(
            f"torchkiln.jit.elementwise: arguments: got {text!r} ({error}), expected such as"
            " 'x, bias, scale: float, shift=1.0': tensors, and numbers with the type float or a"
            " default"
        ) from None
    if not any(not argument.is_number for argument in found):
        raise ValueError(f"torchkiln.jit.elementwise: arguments: got {text!r}, expected a tensor")
    return found


class Elementwise(Op):
    """An op of one formula: see :func:`elementwise`."""

    def __init__(
        self,
        name: str,
        arguments: list[Argument],
        *,
        node: Node | None,
        forward: Formula,
        backward: Formula | None,
        reference: Callable[..., Tensor],
        slopes: Mapping[str, Node] | None,
    ) -> None:
        self.arguments = arguments
        self.node = node
        self.formula = reference
        self._formula = forward
        self._backward_formula = backward
        listed = ", ".join(argument.schema for argument in arguments)
        super().__init__(
            f"torchkiln_jit::{name}({listed}) -> Tensor",
            self._launch,
            reference
            if slopes is None
            else with_gradients(reference, [a.name for a in arguments], slopes),
            gradient=self._launch_backward if backward is not None else None,
            meta=self._empty,
            check=self._require,
        )

    def _require(self, *args: Any) -> None:
        """Tensors of floats on one device that broadcast."""
        where = f"torchkiln.jit.{self.short_name}"
        tensors: list[Tensor] = []
        for argument, value in zip(self.arguments, args, strict=True):
            if argument.is_number:
                continue
            if not isinstance(value, Tensor):
                got = type(value).__name__
                raise TypeError(f"{where}: {argument.name}: got {got}, expected a torch.Tensor")
            if value.dtype not in CUDA_TYPES:
                expected = "float32, float64, float16 or bfloat16"
                raise TypeError(
                    f"{where}: {argument.name}: got dtype {dtype_name(value.dtype)},"
                    f" expected {expected}"
                )
            if tensors and value.device != tensors[0].device:
                raise ValueError(
                    f"{where}: {argument.name}: got device {value.device}, expected"
                    f" {tensors[0].device}, that of {self.arguments[self.positions[0]].name}"
                )
            tensors.append(value)
        try:
            broadcast([t.shape for t in tensors])
        except RuntimeError:
            shapes = ", ".join(str(list(t.shape)) for t in tensors)
            raise ValueError(
                f"{where}: got shapes {shapes}, expected such that broadcast"
            ) from None

    def _split(self, args: Sequence[Any]) -> tuple[list[Tensor], list[float]]:
        tensors = [args[i] for i in self.positions]
        return tensors, [args[i] for i, a in enumerate(self.arguments) if a.is_number]

    def _empty(self, *args: Any) -> Tensor:
        tensors, _ = self._split(args)
        shape = broadcast([t.shape for t in tensors])
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        return tensors[0].new_empty(shape, dtype=dtype)

    def _launch(self, *args: Any) -> Tensor:
        tensors, numbers = self._split(args)
        result = self._empty(*args)
        self._formula.launch([result], tensors, numbers)
        return result

    def _launch_backward(self, grad: Tensor, *args: Any) -> list[Tensor | None]:
        """All gradients from one pass; those of operands that were broadcast are summed up."""
        tensors, numbers = self._split(args)
        assert self._backward_formula is not None
        results = []
        for t in tensors:
            dtype = t.dtype
            if t.shape != grad.shape and dtype != torch.float64:
                dtype = torch.float32  # rounded after the sum
            results.append(torch.empty(grad.shape, dtype=dtype, device=grad.device))
        self._backward_formula.launch(results, [grad, *tensors], numbers)
        return [r.sum_to_size(t.shape).to(t.dtype) for r, t in zip(results, tensors, strict=True)]

    def spec(self, **fields: Any) -> OpSpec:
        """The op's contract; ``fields`` replace what was told from the formula.

        ``domain=(lo, hi)`` says where inputs lie that the formula is defined for.
        """
        from torchkiln.jit.spec import spec_of_formula  # noqa: PLC0415  loaded when used

        return spec_of_formula(self, **fields)


_made: dict[object, Elementwise] = {}


def elementwise(
    expression: str = "",
    arguments: str = "",
    *,
    gradient: Mapping[str, str] | None = None,
    functor: str = "",
    source: str | Path = "",
    reference: Callable[..., Tensor] | None = None,
    name: str = "",
) -> Elementwise:
    """Makes an op of a formula, or of a functor in C++, of tensors that broadcast and numbers.

    It takes float32, float64, float16 and bfloat16, computes in float32 or float64, rounds once,
    and returns a contiguous tensor of the promoted dtype.

    Args:
        expression: Python's notation of the formula: ``"relu(x * scale + bias)"``. Functions are
            those of :mod:`torchkiln.jit.functions`.
        arguments: names in the order of calls, numbers with a type or a default:
            ``"x, bias, scale: float"``. By default all names of the expression, as tensors.
        gradient: for each tensor the gradient as an expression of ``grad`` and the arguments,
            linear in ``grad``; by default the formula's, differentiated.
        functor: instead of an expression a class of ``source`` whose ``operator()(C, C, ...)``
            gets tensors' elements, then numbers, for C = float and double.
        source: C++, or a file of it.
        reference: a functor's formula in plain torch, which the CPU runs and from which the
            gradient comes where ``gradient`` has none.
        name: of the op in ``torch.ops.torchkiln_jit``; by default one made of the formula.
    """
    where = "torchkiln.jit.elementwise"
    if bool(expression) == bool(functor):
        raise ValueError(f"{where}: got {expression!r} and {functor!r}, expected one of the two")
    node = parse(expression) if expression else None
    if node is None and (reference is None or not source or not arguments):
        raise ValueError(f"{where}: functor: expected source, arguments and reference beside it")
    used = list(dict.fromkeys(names_in(node))) if node is not None else []
    found = read_arguments(arguments or ", ".join(used))
    known = [argument.name for argument in found]
    if name and not name.isidentifier():
        raise ValueError(f"{where}: name: got {name!r}, expected a name as Python's are")
    if unknown := [n for n in used if n not in known]:
        raise ValueError(
            f"{where}: arguments: got {arguments!r}, but {unknown[0]} is in the expression"
        )
    text, path = _text(source)
    files = included(text, Path(path).parent, (torchkiln_include(),))  # saved again, it is another
    key = (expression, arguments, str(gradient), functor, f"{text}{files}", reference, name)
    if key in _made and not _made[key]._is_replaced:
        return _made[key]
    tensors = [argument.name for argument in found if not argument.is_number]
    numbers = [argument.name for argument in found if argument.is_number]
    slopes = _gradients(where, node, tensors, known, gradient)
    if node is not None:
        body = cuda_of({"result0_": node})
        reference = reference or reference_of(node, found)
    else:
        body = f"result0_ = {functor}{{}}({', '.join(f'{n}_' for n in [*tensors, *numbers])});"
    backward = None
    if slopes is not None:
        results = {f"result{k}_": part for k, part in enumerate(slopes)}
        backward = Formula([GRAD, *tensors], numbers, cuda_of(results), outputs=len(slopes))
    assert reference is not None
    digest = hashlib.sha256(repr(key[:5]).encode()).hexdigest()[:8]
    made = Elementwise(
        name or f"elementwise_{digest}",
        found,
        node=node,
        forward=Formula(tensors, numbers, body, preamble=text, path=path),
        backward=backward,
        reference=reference,
        slopes=dict(zip(tensors, slopes or (), strict=True)) if gradient is not None else None,
    )
    _made[key] = made
    return made


def _gradients(
    where: str,
    node: Node | None,
    tensors: list[str],
    known: list[str],
    given: Mapping[str, str] | None,
) -> list[Node] | None:
    """The gradient for each tensor; None where torch has to find them."""
    if given is None:
        if node is None:
            return None
        return [call("mul", Name(GRAD), slope(node, name)) for name in tensors]
    if set(given) != set(tensors):
        raise ValueError(f"{where}: gradient: got {sorted(given)}, expected one for each {tensors}")
    parsed = [parse(given[name]) for name in tensors]
    for part in parsed:
        if unknown := [n for n in names_in(part) if n not in (GRAD, *known)]:
            raise ValueError(f"{where}: gradient: got {unknown[0]!r}, expected grad and {known}")
    return parsed


def _text(source: str | Path) -> tuple[str, str]:
    """C++ and where it lies."""
    lines = str(source)
    if isinstance(source, Path) or (lines and "\n" not in lines and "{" not in lines):
        file = Path(source).resolve()
        if not file.is_file():
            raise FileNotFoundError(
                f"torchkiln.jit.elementwise: source: got {source}, expected a file or C++"
            )
        # Included, so that messages name the file and its lines.
        return f'#include "{file.name}"', str(file.with_name("formula.cu"))
    return lines, "formula.cu"
