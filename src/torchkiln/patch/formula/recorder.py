"""The ops of torch in a call, as expressions of its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchkiln.patch.formula import terms
from torchkiln.patch.formula.layout import Axes, Dim, Value
from torchkiln.patch.formula.rules import RULES
from torchkiln.patch.formula.terms import NoFormulaError

WIDE = (torch.float32, torch.float64)
"""Dtypes that a module may compute in, whatever the dtype of its input."""


class DispatchMode(TorchDispatchMode):
    """A mode that sees the ops of a call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: for True, torch would import its compiler to wrap the mode, which takes 3 s."""
        return False


class Recorder(DispatchMode):
    """Runs a call, and keeps an expression for each tensor that an op of torch returns.

    Ops that no formula contains raise :class:`NoFormulaError`: comparisons, clamps, random numbers,
    values that Python reads, ops without gradients, and in-place changes of tensors that the call
    did not create.
    """

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.axes = Axes()
        self.dtypes = (*dtypes, *WIDE)
        self.values: dict[int, Value] = {}
        self.kept: list[Tensor] = []
        self.given: set[int] = set()
        """Addresses of memory that the call must not change."""
        self.is_paused = False
        self.numbers: set[float] = {0.0}
        """All constants that the call added."""
        self.names: set[str] = set()
        """The names of the ops that were called."""

    def add(
        self, tensor: Tensor, name: str, dims: Sequence[Dim], *, overwrites: bool = False
    ) -> Tensor:
        """Make a tensor an input with labelled axes as dimensions.

        ``overwrites`` is whether the call may change the tensor in place.
        """
        labels = tuple(label for dim in dims for label in dim)
        self.set(tensor, Value(terms.leaf(name, labels), tuple(dims)))
        if not overwrites:
            self.given.add(tensor.untyped_storage().data_ptr())
        return tensor

    def set(self, tensor: Tensor, value: Value) -> None:
        """Record the expression of a tensor."""
        self.values[id(tensor)] = value
        self.kept.append(tensor)

    def value(self, tensor: Any) -> Value:
        """The expression of a tensor or a number."""
        if isinstance(tensor, Tensor):
            if id(tensor) not in self.values:
                raise NoFormulaError("it uses a tensor that is no argument and no parameter")
            return self.values[id(tensor)]
        if isinstance(tensor, (int, float)) and not isinstance(tensor, bool):
            return Value(terms.number(tensor), ())
        raise NoFormulaError(f"it computes with a {type(tensor).__name__}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if self.is_paused:
            return func(*args, **options)
        if not torch.is_grad_enabled():
            raise NoFormulaError("it computes without gradients")
        name = func._schema.name.partition("::")[2]
        if name in UNRECORDED:
            return func(*args, **options)
        changes = name.endswith("_") and not name.endswith("__")
        rule = RULES.get(name.removesuffix("_") if changes else name)
        if rule is None and name not in MADE and name != "detach":
            is_random = name.startswith(
                ("bernoulli", "rand", "normal", "uniform", "native_dropout")
            )
            raise NoFormulaError("it draws random numbers" if is_random else f"it calls {name}")
        if changes:
            self.check_change(args[0])
        result = func(*args, **options)
        self.names.add(name)
        if name == "detach":
            return result  # autograd calls detach, too; a later use of the result is refused
        if rule is None:
            if not is_scalar(result):
                raise NoFormulaError("it makes a tensor")
            self.set(result, Value(terms.number(float(result)), ((),) * result.dim()))
            return result
        found = rule(self, args, options, result)
        for tensor, value in zip(outputs(result), outputs(found), strict=True):
            if isinstance(tensor, Tensor) and value is not None:
                self.set(tensor, value)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which ops are not recorded."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def check_change(self, tensor: Tensor) -> None:
        """Refuse an in-place change of an input, or of memory that several tensors share."""
        memory = tensor.untyped_storage().data_ptr()
        sharing = sum(t.untyped_storage().data_ptr() == memory for t in self.kept)
        if memory in self.given:
            raise NoFormulaError("it changes its argument or a parameter in place")
        if sharing > 1:
            raise NoFormulaError("it changes a tensor in place that has views")


UNRECORDED = ("empty_like", "promote_types")
"""Ops that return uninitialised memory, for random numbers, or no tensor."""

MADE = ("lift_fresh", "scalar_tensor", "full", "ones", "zeros")
"""Ops that make constants."""


class OpNames(DispatchMode):
    """Collects the names of the ops of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func._schema.name.partition("::")[2])
        return func(*args, **kwargs or {})


def outputs(result: Any) -> Sequence[Any]:
    """The results of an op."""
    return result if isinstance(result, (tuple, list)) else (result,)


def is_scalar(result: Any) -> bool:
    """Whether a tensor has one element."""
    return isinstance(result, Tensor) and result.numel() == 1 and result.is_floating_point()
