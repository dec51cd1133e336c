"""The expression of the result of each op of torch, from the expressions of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.patch.formula import terms
from torchkiln.patch.formula.layout import Dim, Value
from torchkiln.patch.formula.terms import Expression, NoFormulaError

if TYPE_CHECKING:
    from torchkiln.patch.formula.recorder import Recorder

Rule = Callable[["Recorder", Any, dict[str, Any], Any], Any]
"""Returns the expressions of results, given the recorder, arguments, options and results."""


def binary(
    function: Callable[[Expression, Expression], Expression],
) -> Rule:
    """The rule of an elementwise op of two operands."""

    def rule(recorder: Recorder, args: Any, options: dict[str, Any], _: Any) -> Value:
        one, other = recorder.value(args[0]), recorder.value(args[1])
        if options.keys() - {"alpha"}:
            raise NoFormulaError(f"it computes with {', '.join(options)}")
        alpha = float(options.get("alpha", args[2] if len(args) > 2 else 1))
        dims = recorder.axes.broadcast(one.dims, other.dims)
        for side in (one, other):
            if side.expression.constant is not None:
                recorder.numbers |= {abs(side.expression.constant * alpha)}
        return Value(function(one.expression, other.expression.scaled(alpha)), dims)

    return rule


def power(recorder: Recorder, args: Any, _: Any, __: Any) -> Value:
    """The rule of a power with a constant exponent, or of a constant base."""
    base, exponent = recorder.value(args[0]), recorder.value(args[1])
    if exponent.expression.constant is None:
        raise NoFormulaError("its exponent is no number")
    dims = recorder.axes.broadcast(base.dims, exponent.dims)
    return Value(terms.power(base.expression, exponent.expression.constant), dims)


def unary(recorder: Recorder, name: str, args: Any, options: dict[str, Any]) -> Value:
    """The rule of an elementwise function of one tensor."""
    x = recorder.value(args[0])
    more = {k: v for k, v in options.items() if k == "approximate"}
    if len(args) > 1 or options.keys() - more.keys():
        raise NoFormulaError(f"it calls {name} with options")
    return replace(x, expression=terms.FUNCTIONS[name](x.expression, **more))


def cast(recorder: Recorder, args: Any, _: Any, result: Tensor) -> Value:
    """A cast to float32, to float64 or to the dtype of the input: the same expression."""
    if result.dtype not in recorder.dtypes:
        raise NoFormulaError(f"it rounds to {result.dtype}")
    return recorder.value(args[0])


def is_last(dims: Any, rank: int) -> bool:
    """Whether a reduction is over the last dimension only."""
    return dims is not None and [d % rank for d in ([dims] if isinstance(dims, int) else dims)] == [
        rank - 1
    ]


def reduced(
    recorder: Recorder, x: Tensor, dims: Any, keepdim: bool, result: Tensor
) -> tuple[Value, str, tuple[Dim, ...]]:
    """The operand of a reduction over the last dimension, its axis, and the result's dimensions."""
    value = recorder.value(x)
    if not value.dims or not is_last(dims, x.dim()) or len(value.dims[-1]) != 1:
        raise NoFormulaError("it reduces another dimension than the last")
    if result.dtype not in recorder.dtypes:
        raise NoFormulaError(f"it rounds to {result.dtype}")
    return value, value.dims[-1][0], (*value.dims[:-1], *(((),) if keepdim else ()))


def mean(recorder: Recorder, args: Any, options: dict[str, Any], result: Tensor) -> Value:
    """The rule of ``mean(x, dims, keepdim)``."""
    keepdim = options.get("keepdim", len(args) > 2 and args[2])
    x, axis, dims = reduced(recorder, args[0], args[1], keepdim, result)
    return Value(terms.mean(x.expression, axis), dims)


def total(recorder: Recorder, args: Any, options: dict[str, Any], result: Tensor) -> Value:
    """The rule of ``sum(x, dims, keepdim)``."""
    value = mean(recorder, args, options, result)
    return replace(value, expression=value.expression.scaled(args[0].shape[-1]))


def spread(recorder: Recorder, args: Any, options: dict[str, Any], result: Any) -> Any:
    """The rule of ``var``, ``std`` and ``var_mean`` with a correction."""
    keepdim = options.get("keepdim", False)
    first = result[0] if isinstance(result, tuple) else result
    x, axis, dims = reduced(recorder, args[0], args[1], keepdim, first)
    count = args[0].shape[-1]
    correction = options.get("correction")
    correction = 1 if correction is None else correction
    if count <= correction:
        raise NoFormulaError("its variance has no degrees of freedom")
    center = x.expression - terms.mean(x.expression, axis)
    variance = terms.mean(center * center, axis).scaled(count / (count - correction))
    return Value(variance, dims), Value(terms.mean(x.expression, axis), dims)


def deviation(recorder: Recorder, args: Any, options: dict[str, Any], result: Tensor) -> Value:
    """The rule of ``std``: the root of the variance."""
    variance, _ = spread(recorder, args, options, result)
    found: Value = replace(variance, expression=terms.power(variance.expression, 0.5))
    return found


def length(recorder: Recorder, args: Any, options: dict[str, Any], result: Tensor) -> Value:
    """The rule of ``linalg_vector_norm``: the Euclidean norm of rows."""
    given = [*args[1:], *(2, None, False)[len(args) - 1 :]]
    order, dims, keepdim = given[:3]
    if order != 2 or options.keys() - {"dtype"}:
        raise NoFormulaError("its norm is not Euclidean")
    x, axis, left = reduced(recorder, args[0], dims, keepdim, result)
    squares = terms.mean(x.expression * x.expression, axis).scaled(args[0].shape[-1])
    return Value(terms.power(squares, 0.5), left)


def normalized(recorder: Recorder, args: Sequence[Any], *, centered: bool) -> Value:
    """The result of a norm of torch. ``args``: x, shape, weight, bias and eps."""
    x, shape, weight, bias, eps = args
    value = recorder.value(x)
    if len(shape) != 1 or len(value.dims[-1]) != 1:
        raise NoFormulaError("it normalizes several dimensions")
    axis = value.dims[-1][0]
    center = value.expression
    if centered:
        center -= terms.mean(center, axis)
    variance = terms.mean(center * center, axis) + terms.number(eps)
    recorder.numbers.add(eps)
    result = replace(value, expression=center * terms.power(variance, -0.5))
    for parameter, is_factor in ((weight, True), (bias, False)):
        if parameter is not None:
            other = recorder.value(parameter)
            dims = recorder.axes.broadcast(result.dims, other.dims)
            one, two = result.expression, other.expression
            result = Value(one * two if is_factor else one + two, dims)
    return result


def layer_norm(recorder: Recorder, args: Any, _: Any, __: Any) -> Any:
    """The rule of ``native_layer_norm``; its statistics, which only autograd reads, have none."""
    return normalized(recorder, args, centered=True), None, None


def rms_norm(recorder: Recorder, args: Any, _: Any, result: Any) -> Any:
    """The rule of ``_fused_rms_norm``."""
    x, shape, weight, eps = args
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    found = normalized(recorder, (x, shape, weight, None, eps), centered=False)
    return (found, None) if isinstance(result, tuple) else found


def multiply_add(recorder: Recorder, args: Any, options: dict[str, Any], _: Any) -> Value:
    """The rule of ``addcmul``."""
    c, a, b = map(recorder.value, args[:3])
    dims = recorder.axes.broadcast(recorder.axes.broadcast(a.dims, b.dims), c.dims)
    product = (a.expression * b.expression).scaled(options.get("value", 1))
    return Value(c.expression + product, dims)


def threshold(recorder: Recorder, args: Any, options: dict[str, Any], _: Any) -> Value:
    """The rule of ``threshold(x, 0, 0)``, which is ``relu(x)``."""
    if any(args[1:]):
        raise NoFormulaError("it has a threshold")
    return unary(recorder, "relu", args[:1], options)


def viewed(recorder: Recorder, args: Any, _: Any, result: Tensor) -> Value:
    """The rule of views: a tensor of another shape."""
    x = recorder.value(args[0])
    return replace(x, dims=recorder.axes.viewed(x.dims, result.shape))


def permuted(recorder: Recorder, args: Any, _: Any, __: Tensor) -> Value:
    """The rule of ``permute``, ``transpose`` and ``t``."""
    x = recorder.value(args[0])
    rank = len(x.dims)
    given = args[1] if len(args) == 2 else args[1:]
    places = list(range(rank))
    if len(args) == 2:
        places = [d % rank for d in given]
    elif rank > 1:
        a, b = given or (0, 1)
        places[a], places[b] = places[b], places[a]
    return replace(x, dims=tuple(x.dims[place] for place in places))


def unsqueezed(recorder: Recorder, args: Any, _: Any, result: Tensor) -> Value:
    """The rule of ``unsqueeze``: a new dimension of size 1."""
    x = recorder.value(args[0])
    dims = list(x.dims)
    dims.insert(args[1] % result.dim(), ())
    return replace(x, dims=tuple(dims))


def expanded(recorder: Recorder, args: Any, _: Any, result: Tensor) -> Value:
    """The rule of ``expand``: dimensions of size 1 become larger."""
    x = recorder.value(args[0])
    dims = [
        recorder.axes.expanded(size) if size > 1 and not dim else dim
        for dim, size in zip(
            (*[()] * (result.dim() - len(x.dims)), *x.dims), result.shape, strict=True
        )
    ]
    return replace(x, dims=tuple(dims))


def split(recorder: Recorder, args: Any, _: Any, result: Any) -> list[Value]:
    """The rule of ``split``: equal parts of the last dimension of an input."""
    x = recorder.value(args[0])
    sizes = {part.shape[-1] for part in result}
    dim = (args[2] if len(args) > 2 else 0) % len(x.dims)
    if dim != len(x.dims) - 1 or len(sizes) != 1:
        raise NoFormulaError("it splits another dimension than the last, or unevenly")
    step = sizes.pop()
    return [part_of(recorder, x, i * step, step) for i in range(len(result))]


def sliced(recorder: Recorder, args: Any, options: dict[str, Any], result: Tensor) -> Value:
    """The rule of ``slice``: adjacent columns of an input, or all of a dimension."""
    x = recorder.value(args[0])
    given: list[Any] = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
    dim, start, _, step = given
    if result.shape == args[0].shape and step == 1:
        return x
    if options or dim % len(x.dims) != len(x.dims) - 1 or step != 1:
        raise NoFormulaError("it takes a part of a tensor")
    start = (start or 0) % args[0].shape[-1] if (start or 0) < 0 else start or 0
    return part_of(recorder, x, start, result.shape[-1])


def part_of(recorder: Recorder, x: Value, start: int, size: int) -> Value:
    """A part of an input along the last dimension, as a separate input."""
    ((product, coefficient),) = x.expression.products.items() or (((), 0.0),)
    is_leaf = coefficient == 1.0 and len(product) == 1 and product[0][0][0] == "leaf"
    if not is_leaf or len(x.dims[-1]) != 1:
        raise NoFormulaError("it takes a part of a tensor")
    dim = recorder.axes.add(f"{x.dims[-1][0]}|{size}", size)
    dims = (*x.dims[:-1], dim)
    labels = tuple(label for d in dims for label in d)
    return Value(terms.leaf(f"{product[0][0][1]}[{start}:{start + size}]", labels), dims)


def named(name: str) -> Rule:
    """The rule of a function of :data:`torchkiln.patch.formula.terms.FUNCTIONS`."""
    return lambda recorder, args, options, _: unary(recorder, name, args, options)


RULES: dict[str, Rule] = {
    **{name: named(name) for name in terms.FUNCTIONS},
    "add": binary(lambda a, b: a + b),
    "sub": binary(lambda a, b: a - b),
    "rsub": binary(lambda a, b: b - a),
    "mul": binary(lambda a, b: a * b),
    "div": binary(lambda a, b: a * terms.power(b, -1.0)),
    "pow": power,
    "addcmul": multiply_add,
    "threshold": threshold,
    **dict.fromkeys(("_to_copy", "clone", "alias"), cast),
    **dict.fromkeys(("view", "_unsafe_view", "squeeze"), viewed),
    **dict.fromkeys(("permute", "transpose", "t"), permuted),
    "unsqueeze": unsqueezed,
    "expand": expanded,
    "split": split,
    "slice": sliced,
    "mean": mean,
    "sum": total,
    "var_mean": spread,
    "var": lambda *given: spread(*given)[0],
    "std": deviation,
    "linalg_vector_norm": length,
    "native_layer_norm": layer_norm,
    **dict.fromkeys(("_fused_rms_norm", "rms_norm"), rms_norm),
}
"""The rule of each op of torch, by the name of the op."""
