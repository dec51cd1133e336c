"""The contracts of the gated linear units."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.spec import Invalid, OpSpec, Sample, Traffic
from torchkiln.testing.specs.activation import FLOATING, FORMULAS, SPARSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Shapes of the gate, from the scalar loop to several threads or blocks.
PACKED = {"typical", "no columns", "prime", "vector and one", "images", "threads"}
SHAPES: dict[str, tuple[int, ...]] = {
    "typical": (6, 10),
    "one": (1,),
    "empty": (0,),
    "no columns": (5, 0),
    "empty in the middle": (3, 0, 2),
    "prime": (7, 13),
    "vector less one": (3, 127),
    "vector": (3, 128),
    "vector and one": (3, 129),
    "power of two and one": (1025,),
    "images": (2, 3, 5, 7),
    "rank 9": (2, 1, 2, 3, 1, 2, 1, 2, 3),
    "threads": (257, 261),
}


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Each shape as two tensors, some packed into one."""
    for name, shape in SHAPES.items():
        gate = 2 * normal("gate", shape, device, dtype)
        up = normal("up", shape, device, dtype)
        yield Sample(name, (gate, up))
        if name in PACKED:
            yield Sample(f"{name}, packed", (torch.cat([gate, up], dim=-1),))
    scalar = normal("gate", (), device, dtype)
    yield Sample("0-dim", (scalar, normal("up", (), device, dtype)))
    yield Sample("None for up", (normal("gate", (4, 6), device, dtype), None))


def invalid(name: str, device: torch.device) -> Iterator[Invalid]:
    """Every refusal of a gate."""
    prefix = rf"torchkiln\.{name}: "
    x = torch.ones(2, 4, device=device)

    def case(title: str, args: tuple[object, ...], message: str) -> Invalid:
        return Invalid(title, args, RuntimeError, prefix + message)

    nothing = r"got NoneType, expected a torch\.Tensor"
    yield Invalid("gate None", (None, x), TypeError, f"{prefix}gate: {nothing}")
    yield case(
        "odd columns",
        (torch.ones(3, 7, device=device),),
        "gate: got a last dimension of size 7, expected an even one, to be split into gate and up",
    )
    yield case(
        "0-dim packed",
        (x[0, 0],),
        "gate: got a 0-dimensional tensor, expected at least 1 dimension, to be split into gate "
        "and up",
    )
    for other in (x[:1], x[:, :1], x[0], torch.ones(2, 4, 1, device=device)):
        shape = ", ".join(map(str, other.shape))
        yield case(
            f"up of shape {shape}",
            (x, other),
            rf"up: got shape \[{shape}\], expected \[2, 4\], the shape of gate",
        )
    for dtype in (torch.int64, torch.bool, torch.complex64):
        kind = str(dtype).removeprefix("torch.")
        yield case(kind, (x.to(dtype), x.to(dtype)), f"gate: got dtype {kind}, {FLOATING}")
    yield case(
        "two dtypes",
        (x.half(), x),
        "up: got dtype float32, expected float16, the dtype of gate",
    )
    yield case("sparse gate", (x.to_sparse(),), "gate: " + SPARSE)
    yield case("sparse up", (x, x.to_sparse()), "up: " + SPARSE)
    yield case(
        "meta up",
        (x, x.to("meta")),
        f"up: got device meta, expected {x.device}, the device of gate",
    )
    if device.type != "cpu":
        yield case(
            "up on the CPU",
            (x, x.cpu()),
            f"up: got device cpu, expected {x.device}, the device of gate",
        )


def halves(gate: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gate and up."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1)
    return first, second


def reference(act: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The same without cancellation in the tails."""
    first, second = halves(gate, up)
    return FORMULAS[act].exact(first) * second


def composite(act: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Two ops of torch."""
    first, second = halves(gate, up)
    return FORMULAS[act].value(first) * second


def magnitude(act: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The terms of the activation times |up|."""
    first, second = halves(gate, up)
    return FORMULAS[act].terms(first) * second.abs()


def gradient_magnitude(act: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Its gradients are |up| times the terms of the derivative, and the terms of the activation."""
    first, second = halves(gate, up)
    formula = FORMULAS[act]
    slope = formula.slope_terms(first.detach()) * second.detach().abs()
    return first * slope + second * formula.terms(first.detach())


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """Two matrices of one shape."""
    gate = torch.randn(shape, device=device, dtype=dtype)
    return Sample("bench", (gate, torch.randn_like(gate)))


def large(device: torch.device) -> Sample:
    """A matrix of more than 2**31 elements, and one row seen as often."""
    rows, columns = 2**16 + 1, 2**15 + 1
    gate = torch.arange(rows, device=device).remainder(251).sub(99).div(25).to(torch.bfloat16)
    up = torch.arange(columns, device=device).remainder(241).to(torch.bfloat16)
    return Sample(
        "large",
        (gate.unsqueeze(1).expand(rows, columns).contiguous(), up.expand(rows, columns)),
    )


def traffic(sample: Sample) -> Traffic:
    """Reads gate and up, writes the output."""
    gate, _ = halves(*sample.args)
    return Traffic(3 * gate.numel() * gate.itemsize, 2 * gate.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """Reads the incoming gradient, gate and up, writes two gradients."""
    gate, _ = halves(*sample.args)
    return Traffic(5 * gate.numel() * gate.itemsize, 4 * gate.numel())


def module_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gate and up."""
    return normal("gate", (9, 21), device, dtype), normal("up", (9, 21), device, dtype)


def gated(name: str, act: str, module: Callable[[], nn.Module]) -> OpSpec:
    """The contract of one gate."""
    return OpSpec(
        name=name,
        op=getattr(torchkiln, name),
        overload=getattr(torch.ops.torchkiln, name).default,
        reference=partial(reference, act),
        composite=partial(composite, act),
        magnitude=partial(magnitude, act),
        gradient_magnitude=partial(gradient_magnitude, act),
        inputs=inputs,
        invalid=partial(invalid, name),
        bench=bench,
        large=large,
        traffic=traffic,
        backward_traffic=backward_traffic,
        differentiable=(0, 1),
        opaque=False,
        helpers=("gated_backward",),
        module=lambda *_: module(),
        module_inputs=module_inputs,
    )


SWIGLU = gated("swiglu", "silu", torchkiln.nn.SwiGLU)
GEGLU = gated("geglu", "gelu", torchkiln.nn.GEGLU)
GEGLU_TANH = gated("geglu_tanh", "gelu_tanh", partial(torchkiln.nn.GEGLU, "tanh"))
