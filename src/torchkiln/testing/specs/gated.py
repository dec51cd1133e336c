"""The contracts of the gated linear units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.ops import gated as ops
from torchkiln.testing.data import large_matrix, normal
from torchkiln.testing.derive import layer
from torchkiln.testing.forms import Given, Written, form_of, with_forms
from torchkiln.testing.refusals import SPARSE, GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.activation import FORMULAS
from torchkiln.testing.specs.quantize import quantising

# Shapes of the gate, from the scalar loop to several threads or blocks.
PACKED = {"typical", "no columns", "prime", "vector and one", "images", "threads"}
SHAPES: Mapping[str, tuple[int, ...]] = (
    {"typical": (6, 10), "one": (1,), "empty": (0,), "no columns": (5, 0)}
    | {"empty in the middle": (3, 0, 2), "prime": (7, 13), "vector less one": (3, 127)}
    | {"vector": (3, 128), "vector and one": (3, 129), "power of two and one": (1025,)}
    | {"images": (2, 3, 5, 7), "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3), "threads": (257, 261)}
)


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape as two tensors, and with some shapes as one packed tensor."""
    for name, shape in SHAPES.items():
        gate = 2 * normal("gate", shape, device, dtype)
        up = normal("up", shape, device, dtype)
        yield Sample(name, (gate, up))
        if name in PACKED:
            yield Sample(f"{name}, packed", (torch.cat([gate, up], dim=-1),))
    scalar = normal("gate", (), device, dtype)
    yield Sample("0-dim", (scalar, normal("up", (), device, dtype)))
    yield Sample("None for up", (normal("gate", (4, 6), device, dtype), None))
    other = torch.float32 if dtype.itemsize == 2 else torch.bfloat16
    mixed = normal("gate", (9, 21), device, dtype), normal("up", (9, 21), device, other)
    yield Sample("two dtypes", mixed)


def invalid(name: str, device: torch.device) -> Iterator[Invalid]:
    """Calls with tensors that do not split into gate and up."""
    x = torch.ones(3, 7, device=device)
    good = GoodCall(getattr(torch.ops.torchkiln, name).default, Sample("good", (x[:, :6],)))
    split = "to be split into gate and up"
    words = f"gate: got a last dimension of size 7, expected an even one, {split}"
    yield good.changed(words, gate=x)
    words = f"gate: got a 0-dimensional tensor, expected at least 1 dimension, {split}"
    yield good.changed(words, gate=x[0, 0])
    yield good.changed(f"gate: {SPARSE}", gate=x.to_sparse())


def halves(gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gate and up, from two tensors or from the halves of one."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1)
    return first, second


def reference(act: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The formula, computed without cancellation in its tails."""
    first, second = halves(gate, up)
    return FORMULAS[act].exact(first) * second


def composite(act: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The activation and the product, as two ops of torch."""
    first, second = halves(gate, up)
    return FORMULAS[act].value(first) * second


def magnitude(act: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The magnitude of the activation times |up|."""
    first, second = halves(gate, up)
    return FORMULAS[act].terms(first) * second.abs()


def gradient_magnitude(act: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """A function whose gradients are the op's, with the absolute values of all terms.

    For ``gate``: |up| times the magnitude of the derivative. For ``up``: the magnitude of the
    activation.
    """
    first, second = halves(gate, up)
    formula = FORMULAS[act]
    slope = formula.slope_terms(first.detach()) * second.detach().abs()
    return first * slope + second * formula.terms(first.detach())


def large(device: torch.device) -> Sample:
    """A call with a matrix of more than 2**31 elements, and its first row expanded to it."""
    gate = large_matrix(device)
    return Sample("large", (gate, gate[:1].expand_as(gate)))


def gated(name: str, act: str, module: Callable[..., nn.Module]) -> OpSpec:
    """The contract of one gated unit."""
    return OpSpec(
        op=getattr(ops, name),
        reference=partial(reference, act),
        composite=partial(composite, act),
        magnitude=partial(magnitude, act),
        gradient_magnitude=partial(gradient_magnitude, act),
        inputs=inputs,
        refusals=Refusals(like={"up": "gate"}, mixes=("up",)),
        invalid=partial(invalid, name),
        large=large,
        operations=(2, 4),
        opaque=False,
        helpers=("_gated_backward",),
        module=layer(module),
    )


def new_out(given: Given) -> Tensor:
    """A tensor for the argument ``out``."""
    gate: Tensor = given["gate"]
    shape = list(gate.shape)
    if given.get("up") is None and shape:
        shape[-1] //= 2
    return gate.new_empty(shape)


def with_out(parent: OpSpec) -> OpSpec:
    """The gate with ``out=``. ``torch.ops`` refuses its arguments of wrong kinds."""
    overload = torch.ops.torchkiln._swiglu_out.default
    function = Written(parent.op, overload, {"out": new_out}, plain=parent.op)

    def same_dtypes(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        return (call for call in parent.inputs(device, dtype) if call.name != "two dtypes")

    changes: dict[str, Any] = {"inputs": same_dtypes, "opaque": True}
    return form_of(parent, function, called=parent.name, kinds=False, **changes)


def in_fp8(parent: OpSpec) -> OpSpec:
    """The gate in E4M3."""
    return quantising(parent, "_gated_fp8", "_gated_backward")


SWIGLU = with_forms(gated("swiglu", "silu", torchkiln.nn.SwiGLU), with_out, in_fp8)
GEGLU = with_forms(gated("geglu", "gelu", torchkiln.nn.GEGLU), in_fp8)
GEGLU_TANH = gated("geglu_tanh", "gelu_tanh", partial(torchkiln.nn.GEGLU, "tanh"))
