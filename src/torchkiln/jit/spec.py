"""Specs of ops that are made at run time, for ``torchkiln.testing`` and the benchmark."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.jit.formula.expression import Node, compute, magnitude, slope
from torchkiln.testing import Invalid, OpSpec, Sample, Traffic
from torchkiln.testing.data import normal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torchkiln.jit.formula.arguments import Argument

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
"""The shapes of a sample's tensors, repeated until every tensor has one."""

EXCLUDED = {
    "aot_inductor": "Python launches its kernels, and a compiled model runs without Python",
}


def tensor_traffic(sample: Sample, factor: int, operations: int) -> Traffic:
    """The traffic of an elementwise pass over all tensors and an output as large as the largest.

    Args:
        sample: the call.
        factor: how often each byte moves.
        operations: the operations per element.
    """
    tensors = [sample.args[i] for i in sample.positions]
    largest = max(tensors, key=Tensor.numel)
    bytes_ = sum(t.numel() * t.itemsize for t in tensors) + largest.numel() * largest.itemsize
    return Traffic(factor * bytes_, operations * largest.numel())


def opaque_spec(**fields: Any) -> OpSpec:
    """The spec of an op that is one node in a graph; ``fields`` replace the defaults."""
    defaults: dict[str, Any] = {
        "large": None,
        "traffic": lambda sample: tensor_traffic(sample, 1, 1),
        "backward_traffic": lambda sample: tensor_traffic(sample, 2, 2),
        "opaque": True,
    }
    excluded = {**EXCLUDED, **fields.pop("excluded", {})}
    return OpSpec(**{**defaults, "excluded": excluded, **fields})


def formula_fields(
    name: str,
    arguments: Sequence[Argument],
    node: Node | None,
    *,
    domain: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """The fields of a spec that follow from a formula: samples, refusals, magnitudes.

    Args:
        name: the op, as its errors name it.
        arguments: the arguments of the op.
        node: the formula; None for a functor, whose magnitudes the author gives.
        domain: the range of the inputs; by default they are normally distributed.
    """
    tensors = [argument.name for argument in arguments if not argument.is_number]

    def arrange(values: Callable[[int, str], Tensor]) -> tuple[Any, ...]:
        """The arguments of a call: ``values(i, name)`` makes the i-th tensor."""
        index = itertools.count()
        return tuple(
            (0.75 if a.default is None else a.default)
            if a.is_number
            else values(next(index), a.name)
            for a in arguments
        )

    def draw(
        label: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        values = normal(label, shape, device, torch.float64)
        if domain is not None:
            lo, hi = domain
            values = lo + (hi - lo) * torch.special.ndtr(values)
        return values.to(dtype)

    def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for label, shapes in SHAPES.items():
            if len(shapes) > len(tensors):
                continue
            repeated = itertools.cycle(shapes)
            drawn = [draw(tensor, next(repeated), device, dtype) for tensor in tensors]
            yield Sample(label, arrange(lambda i, _, d=drawn: d[i]))  # type: ignore[misc]
        if len(tensors) > 1:
            mixed = [dtype, torch.float32]
            drawn = [draw(t, (5, 9), device, mixed[i > 0]) for i, t in enumerate(tensors)]
            yield Sample("mixed dtypes", arrange(lambda i, _: drawn[i]))

    def invalid(device: torch.device) -> Iterator[Invalid]:
        prefix = rf"torchkiln\.jit\.{name}: "
        x = torch.ones(2, 4, device=device)
        for i, tensor in enumerate(tensors):
            given = arrange(lambda k, _, i=i: x.long() if k == i else x)  # type: ignore[misc]
            words = f"{tensor}: got dtype int64, expected float32, float64, float16 or bfloat16"
            yield Invalid(f"integers as {tensor}", given, TypeError, prefix + words)
        if len(tensors) > 1:
            given = arrange(lambda k, _: torch.ones(3, device=device) if k == 1 else x)
            words = r"got shapes .*, expected shapes that broadcast"
            yield Invalid("shapes", given, ValueError, prefix + words)

    def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
        return Sample("bench", arrange(lambda _, tensor: draw(tensor, shape, device, dtype)))

    fields: dict[str, Any] = {"inputs": inputs, "invalid": invalid, "bench": bench}
    if node is not None:
        fields["magnitude"] = Magnitude(node, arguments)
        fields["gradient_magnitude"] = GradientMagnitude(node, arguments)
    return fields


class Magnitude:
    """The magnitude of a formula, to which the tests scale the allowed rounding errors."""

    def __init__(self, node: Node, arguments: Sequence[Argument]) -> None:
        self.names = [argument.name for argument in arguments]
        self.defaults = [argument.default for argument in arguments]
        self.node = node

    def values(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], torch.dtype, torch.device]:
        """The arguments by name, and the dtype and device to compute with."""
        given = [*args, *self.defaults[len(args) :]]
        tensors = [value for value in given if isinstance(value, Tensor)]
        return dict(zip(self.names, given, strict=True)), tensors[0].dtype, tensors[0].device

    def __call__(self, *args: Any) -> Tensor:
        """The magnitude for each element of the result."""
        values, dtype, device = self.values(args)
        shapes = [v.shape for v in values.values() if isinstance(v, Tensor)]
        found = compute(magnitude(self.node), values, dtype, device)
        return found.expand(torch.broadcast_shapes(*shapes))


class GradientMagnitude(Magnitude):
    """A function whose gradients are the magnitudes of a formula's derivatives."""

    def __call__(self, *args: Any) -> Tensor:
        """The sum of each tensor times the magnitude of its derivative."""
        values, dtype, device = self.values(args)
        fixed = {k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}
        shapes = [v.shape for v in values.values() if isinstance(v, Tensor)]
        total = torch.zeros(torch.broadcast_shapes(*shapes), dtype=dtype, device=device)
        for name, value in values.items():
            if isinstance(value, Tensor):
                steepness = compute(magnitude(slope(self.node, name)), fixed, dtype, device)
                total = total + value * steepness
        return total
