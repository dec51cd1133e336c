"""The contract of an op that was made at run time."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.jit.formula.expression import compute, magnitude, slope
from torchkiln.testing import Invalid, OpSpec, Sample, Traffic
from torchkiln.testing.data import normal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchkiln.jit.custom_op import Op
    from torchkiln.jit.elementwise_op import Elementwise

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "typical": ((6, 10),),
    "one": ((1,),),
    "0-dim": ((),),
    "empty": ((3, 0, 2),),
    "prime": ((17,),),
    "vector and one": ((129,),),
    "images": ((2, 3, 5, 7),),
    "threads": ((257, 261),),
    "rows": ((31, 33), (33,)),
    "columns": ((31, 32), (31, 1)),
    "both broadcast": ((13, 1), (1, 19)),
    "rank 9": ((2, 1, 2, 3, 1, 2, 1, 2, 3), (1, 2, 2, 1, 2, 2, 3, 1, 3)),
}
"""Shapes of the tensors of a call, taken in turns."""

EXCLUDED = {
    "aot_inductor": "its kernels are made by Python, which a compiled model does without",
}


def traffic(sample: Sample, factor: int, operations: int) -> Traffic:
    """All tensors and an output as large as the largest moved ``factor`` times."""
    tensors = [sample.args[i] for i in sample.positions]
    largest = max(tensors, key=Tensor.numel)
    bytes_ = sum(t.numel() * t.itemsize for t in tensors) + largest.numel() * largest.itemsize
    return Traffic(factor * bytes_, operations * largest.numel())


def spec_of(op: Op, **fields: Any) -> OpSpec:
    """A spec of what an op knows of itself and ``fields``."""
    known: dict[str, Any] = {
        "name": op.short_name,
        "op": op,
        "overload": op.overload,
        "reference": op.reference,
        "composite": op.reference,
        "large": None,
        "traffic": lambda sample: traffic(sample, 1, 1),
        "backward_traffic": lambda sample: traffic(sample, 2, 2),
        "differentiable": op.positions,
        "helpers": op.helpers,
        "opaque": True,
    }
    excluded = {**EXCLUDED, **fields.pop("excluded", {})}
    return OpSpec(**{**known, "excluded": excluded, **fields})


def spec_of_formula(
    op: Elementwise, domain: tuple[float, float] | None = None, **fields: Any
) -> OpSpec:
    """A spec with samples, refusals and magnitudes of a formula."""
    tensors = [op.arguments[i].name for i in op.positions]

    def arranged(values: Callable[[int, str], Tensor]) -> tuple[Any, ...]:
        """All arguments of a call, tensors by their place among tensors and their name."""
        place = itertools.count()
        return tuple(
            (0.75 if a.default is None else a.default)
            if a.is_number
            else values(next(place), a.name)
            for a in op.arguments
        )

    def draw(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        values = normal(name, shape, device, torch.float64)
        if domain is not None:
            lo, hi = domain
            values = lo + (hi - lo) * torch.special.ndtr(values)
        return values.to(dtype)

    def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for label, shapes in SHAPES.items():
            if len(shapes) > len(tensors):
                continue
            chosen = itertools.cycle(shapes)
            drawn = [draw(name, next(chosen), device, dtype) for name in tensors]
            yield Sample(label, arranged(lambda i, _, d=drawn: d[i]))  # type: ignore[misc]
        if len(tensors) > 1:
            mixed = [dtype, torch.float32]
            drawn = [draw(n, (5, 9), device, mixed[i > 0]) for i, n in enumerate(tensors)]
            yield Sample("mixed dtypes", arranged(lambda i, _: drawn[i]))

    def invalid(device: torch.device) -> Iterator[Invalid]:
        prefix = rf"torchkiln\.jit\.{op.short_name}: "
        x = torch.ones(2, 4, device=device)
        for i, name in enumerate(tensors):
            whole = arranged(lambda k, _, i=i: x.long() if k == i else x)  # type: ignore[misc]
            words = f"{name}: got dtype int64, expected float32, float64, float16 or bfloat16"
            yield Invalid(f"integers as {name}", whole, TypeError, prefix + words)
        if len(tensors) > 1:
            wrong = arranged(lambda k, _: torch.ones(3, device=device) if k == 1 else x)
            words = r"got shapes .*, expected such that broadcast"
            yield Invalid("shapes", wrong, ValueError, prefix + words)

    def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
        return Sample("bench", arranged(lambda _, name: draw(name, shape, device, dtype)))

    known: dict[str, Any] = {
        "reference": op.formula,
        "composite": op.formula,
        "inputs": inputs,
        "invalid": invalid,
        "bench": bench,
    }
    if op.node is not None:
        known["magnitude"] = Magnitude(op)
        known["gradient_magnitude"] = GradientMagnitude(op)
    return spec_of(op, **{**known, **fields})


class Magnitude:
    """The sum of the absolute values of the terms of each element of a formula."""

    def __init__(self, op: Elementwise) -> None:
        assert op.node is not None
        self.names = [argument.name for argument in op.arguments]
        self.defaults = [argument.default for argument in op.arguments]
        self.node = op.node

    def values(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], torch.dtype, torch.device]:
        """Values by their names; with what they are computed."""
        given = [*args, *self.defaults[len(args) :]]
        tensors = [value for value in given if isinstance(value, Tensor)]
        return dict(zip(self.names, given, strict=True)), tensors[0].dtype, tensors[0].device

    def __call__(self, *args: Any) -> Tensor:
        """The magnitudes, of the shape of the result."""
        values, dtype, device = self.values(args)
        shapes = [v.shape for v in values.values() if isinstance(v, Tensor)]
        found = compute(magnitude(self.node), values, dtype, device)
        return found.expand(torch.broadcast_shapes(*shapes))


class GradientMagnitude(Magnitude):
    """A function whose gradients are the magnitudes of a formula's derivatives."""

    def __call__(self, *args: Any) -> Tensor:
        """The sum of each tensor times the magnitude of the derivative for it."""
        values, dtype, device = self.values(args)
        fixed = {k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}
        shapes = [v.shape for v in values.values() if isinstance(v, Tensor)]
        total = torch.zeros(torch.broadcast_shapes(*shapes), dtype=dtype, device=device)
        for name, value in values.items():
            if isinstance(value, Tensor):
                steep = compute(magnitude(slope(self.node, name)), fixed, dtype, device)
                total = total + value * steep
        return total
