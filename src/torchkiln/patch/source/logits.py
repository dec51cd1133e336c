"""Logits of a head that are computed only if they are read. A loss of tokens does not read them."""

from __future__ import annotations

import builtins
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional as F

from torchkiln.nn.plain import has_hooks
from torchkiln.ops.cross_entropy import linear_cross_entropy
from torchkiln.patch.formula.linear import is_exporting, is_tracing
from torchkiln.patch.plan import plan_of
from torchkiln.patch.source.head_call import Call, Kept, check, kept, modes_of, within
from torchkiln.patch.source.layer import taken

LOGITS = "_kiln_logits"
"""The helper in rewritten source: ``layer(x)``, to be computed later."""

INNER = "inner"
"""The mode of a module around a head that makes no loss."""

PENDING = "_kiln_pending"
"""The argument of such a module: whether its caller takes :class:`Logits`."""

PLAIN = (Tensor, nn.Parameter)


class Logits:
    """A tensor that is not computed yet: a call of a head, and methods after it.

    A loss of tokens is computed without it. Every other function gets the tensor.
    """

    def __init__(
        self,
        call: Call,
        rows: Tensor,
        steps: tuple[tuple[Any, ...], ...],
        dtype: torch.dtype,
        added: tuple[Kept, ...] = (),
    ) -> None:
        self.call = call
        self.rows = rows
        """The inputs of the head, in the shape of the logits except for the last size."""
        self.steps = steps
        """The methods that are called after the product: names, with arguments."""
        self.dtype = dtype
        self.added = added
        """The biases among the steps."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return torch.Size((*self.rows.shape[:-1], self.call.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self.rows.device

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The number of dimensions."""
        return self.rows.dim()

    def tensor(self) -> Tensor:
        """The tensor, in the forward that has called the head."""
        check(self.added)
        made = self.call.product()
        for name, *args in self.steps:
            made = getattr(made, name)(*args)
        return made

    def read(self) -> Tensor:
        """The tensor, read after the forward, but with its modes for gradients and autocast."""
        with within(self.device.type, self.call.modes):
            return self.tensor()

    def after(
        self,
        *step: Any,
        rows: Tensor | None = None,
        dtype: torch.dtype | None = None,
        added: tuple[Kept, ...] = (),
    ) -> Logits:
        """The logits after one more method, with the rows, dtype and biases that it changes."""
        rows = self.rows if rows is None else rows
        steps, added = (*self.steps, step), (*self.added, *added)
        return Logits(self.call, rows, steps, dtype or self.dtype, added)

    def float(self) -> Any:
        """The logits in float32."""
        return self.to(torch.float32)

    def to(self, *args: Any, **options: Any) -> Any:
        """The logits in another dtype. A conversion to the same device returns ``self``."""
        if not options and len(args) == 1:
            if args[0] == self.device:
                return self
            if args[0] in {torch.float32, self.dtype}:
                return self.after("to", args[0], dtype=args[0])
        return self.tensor().to(*args, **options)

    def contiguous(self) -> Logits:
        """The logits in contiguous memory; the call is recorded for later."""
        return self.after("contiguous")

    def view(self, *shape: Any) -> Any:
        """The logits in another shape or dtype. A shape that torch refuses makes a copy."""
        is_dtype = len(shape) == 1 and isinstance(shape[0], torch.dtype)
        return self.tensor().view(*shape) if is_dtype else self.reshape(*shape)

    def reshape(self, *shape: Any) -> Any:
        """The logits in another shape."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        classes, features = self.call.weight.shape
        if sizes[-1] != classes or len(sizes) < 2:
            return self.tensor().reshape(sizes)
        return self.after("reshape", sizes, rows=self.rows.reshape(*sizes[:-1], features))

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(x, (int, slice)) or x is Ellipsis for x in parts):
            return self.tensor()[index]
        ends = parts[-1] == slice(None) or parts[-1] is Ellipsis
        others = len(parts) - 1 if ends else len(parts)
        if (not ends and Ellipsis in parts) or others >= self.dim():
            return self.tensor()[index]
        return self.after("__getitem__", index, rows=self.rows[index])

    def tanh(self) -> Logits:
        """The hyperbolic tangent of the logits."""
        return self.after("tanh")

    def __truediv__(self, other: Any) -> Any:
        is_number = type(other) in (int, float)
        return self.after("__truediv__", other) if is_number else self.tensor() / other

    def __mul__(self, other: Any) -> Any:
        is_number = type(other) in (int, float)
        return self.after("__mul__", other) if is_number else self.tensor() * other

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        classes = self.call.weight.shape[0]
        is_bias = type(other) in PLAIN and other.numel() == classes == other.shape[-1]
        dtypes = (self.dtype, torch.float32)
        if not is_bias or other.dim() > self.dim() or other.dtype not in dtypes:
            return self.tensor() + other
        dtype = torch.promote_types(self.dtype, other.dtype)
        return self.after("__add__", other, dtype=dtype, added=(kept(other),))

    __radd__ = __add__

    def loss(
        self, target: Any, weight: Any, ignore_index: int, reduction: Any, label_smoothing: Any
    ) -> Tensor | None:
        """The cross-entropy, or None if the op does not compute it."""
        call, rows, form = self.call, self.rows, self.form()
        takes_target = type(target) in PLAIN and target.dtype == torch.int64
        if form is None or not takes_target or rows.dim() != 2:
            return None
        if target.shape != rows.shape[:1] or target.device != rows.device:
            return None
        is_plain = type(weight) in PLAIN and weight.dtype == self.dtype
        if weight is not None and (not is_plain or weight.requires_grad):
            return None
        check((*call.parts, *self.added))
        bias, softcap, temperature = form
        kind = self.device.type
        has_grad, is_inference, cast = modes_of(kind)
        is_cast = cast is not None and self.dtype != torch.float64
        call.has_loss = True
        with within(kind, (has_grad, is_inference, call.modes[2])):
            return linear_cross_entropy(
                rows,
                call.weight,
                target,
                linear_bias=bias,
                weight=weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
                loss_dtype=torch.float32 if is_cast else self.dtype,
                softcap=softcap,
                temperature=temperature,
            )

    def form(self) -> tuple[Tensor | None, builtins.float | None, builtins.float] | None:
        """Bias, softcap and temperature with which the op computes the same logits, or None."""
        bias, softcap = self.call.bias, None
        divisor = factor = 1.0
        for name, *args in self.steps:
            if name == "__add__":
                if softcap is not None or divisor != 1 or factor != 1:
                    return None
                added = args[0].reshape(-1)
                bias = added if bias is None else bias + added
            elif name == "__truediv__":
                divisor *= args[0]
            elif name == "__mul__":
                factor *= args[0]
            elif name == "tanh":
                if softcap is not None or not is_positive(divisor, factor):
                    return None
                softcap = divisor / factor
        return (bias, softcap, divisor / factor) if is_positive(divisor, factor) else None

    @classmethod
    def __torch_function__(
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if func is F.cross_entropy:
            return cross_entropy(*args, **options)
        if func is torch.tanh and len(args) == 1 and isinstance(args[0], Logits) and not options:
            return args[0].tanh()
        args = tuple(known(x) for x in args)
        return func(*args, **{name: known(x) for name, x in options.items()})


def is_positive(divisor: float, factor: float) -> bool:
    """Whether a quotient is a number greater than 0."""
    return factor > 0 and divisor > 0 and math.isfinite(divisor) and math.isfinite(factor)


def known(x: Any) -> Any:
    """The tensor of logits; other values are returned unchanged."""
    return x.tensor() if isinstance(x, Logits) else x


def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` with logits that need not be computed."""
    found = None
    if isinstance(input, Logits) and size_average is None and reduce is None:
        found = input.loss(target, weight, ignore_index, reduction, label_smoothing)
    if found is not None:
        return found
    given = (known(input), known(target), weight, size_average, ignore_index, reduce)
    return F.cross_entropy(*given, reduction, label_smoothing)


def logits_of(layer: Any, wanted: Any, /, *args: Any, **options: Any) -> Any:
    """``layer(x)`` as :class:`Logits`, if a loss is wanted and the layer is torch's.

    A layer with hooks, an adapter, a parametrization, or a weight that is distributed is called.
    """
    if wanted is None or wanted is False:
        return layer(*args, **options)
    if getattr(plan_of(layer), "head", ())[1:] == (INNER,):
        if not has_hooks(layer):
            options = {**options, PENDING: True}
    elif len(args) == 1 and not options and (given := waits(layer, args[0])):
        call = Call(args[0], *given)
        return Logits(call, args[0], (), call.dtype)
    return layer(*args, **options)


def waits(layer: Any, x: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias, if the product of a layer can be computed later."""
    given = taken(layer, x)
    if given is None or type(x) not in PLAIN or has_hooks(layer) or x.dim() < 2:
        return None
    if any(part is not None and type(part) not in PLAIN for part in given):
        return None
    return None if is_recorded() else given


def is_recorded() -> bool:
    """Whether torch exports, traces or transforms the call: the results must be tensors."""
    if is_compiling():
        return is_exporting()
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return is_transformed or forward_ad._current_level >= 0 or is_tracing()


MODULES = ("transformers.loss.loss_utils", "torchkiln.patch.formula.loss_function")
"""The modules whose losses use only those methods of logits that :class:`Logits` has."""


def is_known(function: Any) -> bool:
    """Whether a ``loss_function`` takes :class:`Logits`."""
    return getattr(function, "__module__", "") in MODULES


def takes_logits(function: Any) -> Any:
    """A ``loss_function`` that takes :class:`Logits`; a user's function gets tensors from it."""
    if is_known(function):
        return function

    def call(*args: Any, **options: Any) -> Any:
        return function(*map(known, args), **{name: known(x) for name, x in options.items()})

    return call
