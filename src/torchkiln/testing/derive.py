"""Default values of the fields of a spec, derived from its schema and samples.

:class:`torchkiln.testing.OpSpec` lists these fields and how to override each.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef

from torchkiln.testing.compare import outputs
from torchkiln.testing.data import LARGE, cycle, large_matrix, normal
from torchkiln.testing.refusals import kinds_of
from torchkiln.testing.sample import Sample, Traffic

if TYPE_CHECKING:
    from torchkiln.testing.spec import OpSpec

    Draw = Callable[[list[int]], Tensor]

CPU = torch.device("cpu")


def arguments(spec: OpSpec) -> dict[str, Any]:
    """The arguments of the op's schema by name, in order."""
    return {argument.name: argument for argument in spec.overload._schema.arguments}


def find_name(spec: OpSpec) -> str:
    """The name of the function, or of the op in ``torch.ops``; empty if it has none."""
    found = own_overload(spec.op)
    if found is not None:
        return str(found._schema.name).partition("::")[2]
    return getattr(spec.op, "__name__", "")


def own_overload(function: Any) -> Any:
    """The overload of a ``torch.library.custom_op`` or of an op in ``torch.ops``, or None."""
    if isinstance(function, CustomOpDef):
        return function._opoverload
    if isinstance(function, torch._ops.OpOverloadPacket):
        names = function.overloads()
        return getattr(function, names[0]) if len(names) == 1 else None
    return function if isinstance(function, torch._ops.OpOverload) else None


def overload_of(function: Any, name: str) -> Any:
    """The function's own overload, or the op of this name in the namespace of its package."""
    if (own := own_overload(function)) is not None:
        return own
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    found = getattr(getattr(torch.ops, package), name, None) if package else None
    return None if found is None else found.default


def find_differentiable(spec: OpSpec) -> tuple[int, ...]:
    """The positions of all tensors among the positional arguments."""
    overload: Any = spec.overload
    if not isinstance(overload, torch._ops.OpOverload):  # validate() reports the error
        return ()
    kinds = kinds_of(overload)
    positional = [name for name, one in arguments(spec).items() if not one.kwarg_only]
    return tuple(i for i, name in enumerate(positional) if kinds[name] in ("Tensor", "Tensor?"))


VALUES: dict[str, Callable[[OpSpec], Any]] = {
    "name": find_name,
    "overload": lambda spec: overload_of(spec.op, spec.name),
    "composite": lambda spec: spec.reference,
    "differentiable": find_differentiable,
}
"""Fields that are filled in when a spec is made, in this order."""


def results(spec: OpSpec, sample: Sample) -> tuple[Tensor, ...]:
    """Outputs of a call on the meta device: shapes and dtypes, but no data."""
    for (name, kind), value in zip(kinds_of(spec.overload).items(), sample.args, strict=False):
        if kind == "Tensor" and not isinstance(value, Tensor):  # a number has no bytes to count
            raise TypeError(f"torchkiln.testing: {spec.name}: {name}: got {value!r}, not a tensor")
    with torch.no_grad():
        return outputs(sample.map(lambda t: t.to("meta")).call(spec.op))


def operations(spec: OpSpec, sample: Sample, elements: int) -> tuple[int, int]:
    """Operations of forward and backward for a first output of ``elements`` elements."""
    if callable(spec.operations):
        return spec.operations(sample)
    forward, backward = spec.operations
    return forward * elements, backward * elements


def traffic(spec: OpSpec, sample: Sample) -> Traffic:
    """Traffic of forward, which reads all tensors and writes all outputs."""
    written = results(spec, sample)
    moved = sum(tensor.nbytes for tensor in (*sample.tensors, *written))
    return Traffic(moved, operations(spec, sample, written[0].numel())[0])


def backward_traffic(spec: OpSpec, sample: Sample) -> Traffic:
    """Traffic of backward, which reads all tensors and the gradients of all outputs.

    Backward writes a gradient for each differentiable argument.
    """
    incoming = results(spec, sample)
    written = sample.take(spec.wanted(sample))
    moved = sum(tensor.nbytes for tensor in (*sample.tensors, *incoming, *written))
    return Traffic(moved, operations(spec, sample, incoming[0].numel())[1])


def matrix_call(
    spec: OpSpec, field: str, dtype: torch.dtype, shape: tuple[int, int], draw: Draw
) -> Sample:
    """The typical call, whose first tensor is a matrix, with ``shape`` for the sizes of the matrix.

    ``draw`` makes each tensor from its sizes.
    """
    typical = spec.typical(CPU, dtype)
    first = typical.args[typical.positions[0]]

    def impossible(what: str) -> ValueError:
        return ValueError(
            f"torchkiln.testing: {spec.name}: {field}: got {what} in the typical sample "
            f"{typical.name!r}, expected a matrix and tensors of its rows and columns, from which "
            f"{field} is derived; give {field}"
        )

    if first.dim() != 2:
        raise impossible(f"shape {list(first.shape)} of the first tensor")
    if any(isinstance(value, (tuple, list)) for value in (*typical.args, *typical.kwargs.values())):
        raise impossible("a sequence of sizes")
    pairs = list(zip(first.shape, shape, strict=True))

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise impossible(f"a tensor of dtype {tensor.dtype}")
        sizes = []
        for d, size in enumerate(tensor.shape):
            # If rows and columns are equal in number, the last dimension counts as columns.
            known = dict(pairs if d == tensor.dim() - 1 else reversed(pairs)) | {1: 1}
            if size not in known:
                raise impossible(f"shape {list(tensor.shape)}")
            sizes.append(known[size])
        return draw(sizes)

    call = typical.map(drawn)
    return replace(call, name=field, kwargs=without_defaults(spec, call), seed=None)


def without_defaults(spec: OpSpec, sample: Sample) -> dict[str, Any]:
    """Keyword arguments of the call that differ from the defaults of the schema."""
    known = arguments(spec)
    return {
        name: value
        for name, value in sample.kwargs.items()
        if isinstance(value, Tensor)
        or name not in known
        or not known[name].has_default_value()
        or known[name].default_value != value
    }


def bench(spec: OpSpec, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """The typical call with normal deviates, and ``shape`` for the sizes of its matrix."""
    draw = functools.partial(torch.randn, device=device, dtype=dtype)
    return matrix_call(spec, "bench", dtype, shape, draw)


def large(spec: OpSpec, device: torch.device) -> Sample:
    """The typical call in bfloat16 with a matrix of more than 2**31 elements.

    All matrices of the call are one tensor, to save memory.
    """
    matrix = functools.cache(large_matrix)

    def draw(sizes: list[int]) -> Tensor:
        count = math.prod(sizes)
        is_whole = count == math.prod(LARGE)
        return (matrix(device) if is_whole else cycle(count, 241, device)).reshape(sizes)

    return matrix_call(spec, "large", torch.bfloat16, LARGE, draw)


def module_inputs(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Tensors of the typical call, except those with the names of the module's parameters."""
    if spec.module is None:
        return ()
    owned = {name for name, _ in spec.module(device, dtype).named_parameters()}
    names = list(arguments(spec))
    sample = spec.typical(device, dtype)
    return tuple(sample.args[i] for i in sample.positions if names[i] not in owned)


def layer(
    make: Callable[..., nn.Module], *args: Any, **kwargs: Any
) -> Callable[[torch.device, torch.dtype], nn.Module]:
    """A value for the field ``module``: calls ``make(*args, **kwargs)`` and fills the parameters.

    ``make`` is called with device and dtype if it accepts them. Parameters are normal deviates
    seeded by their names: at the usual initial values 0 and 1 a lost parameter has no effect.
    """

    def module(device: torch.device, dtype: torch.dtype) -> nn.Module:
        places = {"device": device, "dtype": dtype}
        accepted = inspect.signature(make).parameters
        made = make(*args, **kwargs, **{k: v for k, v in places.items() if k in accepted})
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                parameter.copy_(normal(name, parameter.shape, device, dtype))
        return made

    return module
