"""Elementwise ops from one formula: one kernel forward, one kernel backward."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.jit.call.layout import broadcast
from torchkiln.jit.compile.includes import scan
from torchkiln.jit.custom_op import MAKING, Op
from torchkiln.jit.formula.arguments import Argument, is_plain, read_arguments
from torchkiln.jit.formula.expression import Name, Node, call, cuda_of, names_in, parse, slope
from torchkiln.jit.formula.reference import GRAD, reference_of, with_gradients
from torchkiln.jit.formula.source import CUDA_TYPES
from torchkiln.jit.formula_kernel import FormulaKernel
from torchkiln.ops._traced import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchkiln.testing import OpSpec

WHERE = "torchkiln.jit.elementwise"


class Elementwise(Op):
    """A torch op from one formula; see :func:`elementwise`."""

    def __init__(
        self,
        name: str,
        arguments: list[Argument],
        *,
        node: Node | None,
        forward: FormulaKernel,
        backward: FormulaKernel | None,
        reference: Callable[..., Tensor],
        slopes: Mapping[str, Node] | None,
    ) -> None:
        self.arguments = arguments
        self.node = node
        self.formula = reference
        self._kernel_forward = forward
        self._kernel_backward = backward
        parameters = ", ".join(argument.schema for argument in arguments)
        super().__init__(
            f"torchkiln_jit::{name}({parameters}) -> Tensor",
            self._launch,
            reference
            if slopes is None
            else with_gradients(reference, [a.name for a in arguments], slopes),
            gradient=self._launch_backward if backward is not None else None,
            meta=self._empty,
            check=self._require,
        )

    if TYPE_CHECKING:  # at run time Op.__call__ is used, which saves a frame

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            """Calls the op, which returns one tensor."""

    def _require(self, *args: Any) -> None:
        """Raises unless all tensors are floating point, on one device, and broadcast."""
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
                    f"{where}: {argument.name}: got dtype {name_of(value.dtype)},"
                    f" expected {expected}"
                )
            if tensors and value.device != tensors[0].device:
                first = self.arguments[self.positions[0]].name
                raise ValueError(
                    f"{where}: {argument.name}: got device {value.device}, expected"
                    f" {tensors[0].device}, the device of {first}"
                )
            tensors.append(value)
        try:
            broadcast([t.shape for t in tensors])
        except RuntimeError:
            shapes = ", ".join(str(list(t.shape)) for t in tensors)
            raise ValueError(
                f"{where}: got shapes {shapes}, expected shapes that broadcast"
            ) from None

    def _split(self, args: Sequence[Any]) -> tuple[list[Tensor], list[float]]:
        """The tensors and the numbers of a call."""
        tensors = [args[i] for i in self.positions]
        return tensors, [args[i] for i, a in enumerate(self.arguments) if a.is_number]

    def _empty(self, *args: Any) -> Tensor:
        """The result of a call, uninitialised."""
        tensors, _ = self._split(args)
        shape = broadcast([t.shape for t in tensors])
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        return tensors[0].new_empty(shape, dtype=dtype)

    def _launch(self, *args: Any) -> Tensor:
        tensors, numbers = self._split(args)
        result = self._empty(*args)
        self._kernel_forward.launch([result], tensors, numbers)
        return result

    def _launch_backward(self, grad: Tensor, *args: Any) -> list[Tensor | None]:
        """All gradients from one kernel; gradients of broadcast tensors are summed afterwards."""
        tensors, numbers = self._split(args)
        assert self._kernel_backward is not None
        results = []
        for t in tensors:
            dtype = t.dtype
            if t.shape != grad.shape and dtype != torch.float64:
                dtype = torch.float32  # gradients are rounded after the sum
            results.append(torch.empty(grad.shape, dtype=dtype, device=grad.device))
        self._kernel_backward.launch(results, [grad, *tensors], numbers)
        return [r.sum_to_size(t.shape).to(t.dtype) for r, t in zip(results, tensors, strict=True)]

    def spec(self, *, domain: tuple[float, float] | None = None, **fields: Any) -> OpSpec:
        """The op's spec, complete for a formula.

        Args:
            domain: the range of the inputs, for a formula that is not defined for all numbers.
            fields: fields of :class:`torchkiln.testing.OpSpec` that replace derived fields.
        """
        from torchkiln.jit.spec import formula_fields  # noqa: PLC0415  calls need no test suite

        own = formula_fields(self.short_name, self.arguments, self.node, domain=domain)
        own |= {"reference": self.formula, "composite": self.formula}
        return super().spec(**{**own, **fields})


_made: dict[str, tuple[object, Elementwise]] = {}
"""The definition of each op and the op, by name. A later op replaces an op of the same name."""


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
    """Makes a torch op from a formula, or from a functor in C++.

    The op takes tensors that broadcast, of float32, float64, float16 or bfloat16, and numbers. It
    computes in float32, or in float64 if a tensor has that dtype, rounds once, and returns a
    contiguous tensor of the promoted dtype.

    Args:
        expression: the formula in Python's notation: ``"relu(x * scale + bias)"``. docs/jit.md
            lists the functions.
        arguments: the names in the order of calls: ``"x, bias, scale: float, shift=1.0"``. A number
            has the type float or a default; all others are tensors. By default the names of the
            expression from left to right, all tensors.
        gradient: for each tensor the gradient, as an expression of ``grad`` and the arguments that
            is linear in ``grad``. By default derived from the expression.
        functor: instead of an expression the name of a class in ``source``. Its
            ``operator()(C, C, ...)`` gets an element of each tensor, then the numbers, for C =
            float and double.
        source: C++ text, or the path of a C++ file.
        reference: the functor's formula in plain torch, which the CPU runs. It also gives the
            gradient if ``gradient`` is missing.
        name: the op's name in ``torch.ops.torchkiln_jit``; by default derived from the formula.
    """
    if bool(expression) == bool(functor):
        raise ValueError(
            f"{WHERE}: got expression {expression!r} and functor {functor!r}, expected one of them"
        )
    node = parse(expression) if expression else None
    if node is None and (reference is None or not source or not arguments):
        raise ValueError(
            f"{WHERE}: functor: got {functor!r} alone, expected also source, arguments, reference"
        )
    used = list(dict.fromkeys(names_in(node))) if node is not None else []
    found = read_arguments(arguments or ", ".join(used))
    # torch gives each namespace of torch.ops an attribute `name`
    if name and (not is_plain(name) or name.startswith("__") or name == "name"):
        raise ValueError(
            f"{WHERE}: name: got {name!r}, expected a Python identifier of ASCII characters"
        )
    if missing := [n for n in used if all(n != argument.name for argument in found)]:
        raise ValueError(
            f"{WHERE}: arguments: got {arguments!r}, expected {missing[0]} among them, which the"
            " expression uses"
        )
    text, path = _read_source(source)
    files = scan(text, path).files  # a changed file makes a new op
    key = (expression, arguments, str(gradient), functor, f"{text}{files}", reference, name)
    if not name:
        name = f"elementwise_{hashlib.sha256(repr(key[:5]).encode()).hexdigest()[:8]}"
    with MAKING:
        former, op = _made.get(name, (None, None))
        if op is None or former != key or op._is_replaced:
            op = _make(
                name, found, node, reference, functor=functor, preamble=(text, path), given=gradient
            )
            _made[name] = key, op
        return op


def _make(
    name: str,
    found: list[Argument],
    node: Node | None,
    reference: Callable[..., Tensor] | None,
    *,
    functor: str,
    preamble: tuple[str, str],
    given: Mapping[str, str] | None,
) -> Elementwise:
    """Makes an op from the arguments of :func:`elementwise`, which has checked them."""
    tensors = [argument.name for argument in found if not argument.is_number]
    numbers = [argument.name for argument in found if argument.is_number]
    known = [argument.name for argument in found]
    slopes = _gradients(node, tensors, known, given)
    if node is not None:
        body = cuda_of({"result0_": node})
        reference = reference or reference_of(node, found)
    else:
        body = f"result0_ = {functor}{{}}({', '.join(f'{n}_' for n in [*tensors, *numbers])});"
    backward = None
    if slopes is not None:
        results = {f"result{k}_": part for k, part in enumerate(slopes)}
        backward = FormulaKernel([GRAD, *tensors], numbers, cuda_of(results))
    assert reference is not None
    return Elementwise(
        name,
        found,
        node=node,
        forward=FormulaKernel(tensors, numbers, body, preamble=preamble[0], path=preamble[1]),
        backward=backward,
        reference=reference,
        slopes=dict(zip(tensors, slopes or (), strict=True)) if given is not None else None,
    )


def _gradients(
    node: Node | None,
    tensors: list[str],
    known: list[str],
    given: Mapping[str, str] | None,
) -> list[Node] | None:
    """The gradient of each tensor; None for a functor, whose reference torch differentiates."""
    if given is None:
        if node is None:
            return None
        return [call("mul", Name(GRAD), slope(node, name)) for name in tensors]
    if set(given) != set(tensors):
        raise ValueError(f"{WHERE}: gradient: got {sorted(given)}, expected one for each {tensors}")
    parsed = [parse(given[name], "gradient") for name in tensors]
    for part in parsed:
        if unknown := [n for n in names_in(part) if n not in (GRAD, *known)]:
            raise ValueError(f"{WHERE}: gradient: got {unknown[0]!r}, expected grad and {known}")
    return parsed


def _read_source(source: str | Path) -> tuple[str, str]:
    """C++ text, and the path that its includes and messages refer to."""
    text = str(source)
    if isinstance(source, Path) or (text and "\n" not in text and "{" not in text):
        file = Path(source).resolve()
        if not file.is_file():
            raise FileNotFoundError(f"{WHERE}: source: got {source}, expected a file or C++")
        # An include, so that compiler messages name the file and its lines.
        return f'#include "{file.name}"', str(file.with_name("formula.cu"))
    return text, "formula.cu"
