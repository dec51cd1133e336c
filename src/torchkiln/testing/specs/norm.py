"""The contracts of the norms."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.spec import OpSpec, Result, Sample, Traffic
from torchkiln.testing.specs.norm_invalid import invalid

if TYPE_CHECKING:
    from collections.abc import Iterator

# Shapes of x, and how many of the last sizes are normalized together: one row and one column, no
# row and no column, every vector tail, narrow, long and many rows (the gradients of weight and bias
# are sums over them).
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "typical": ((6, 10), 1),
    "one": ((1,), 1),
    "one row": ((37,), 1),
    "one column": ((41, 1), 1),
    "no rows": ((0, 5), 1),
    "no columns": ((5, 0), 1),
    "empty in the middle": ((3, 0, 4), 2),
    "prime": ((7, 13), 1),
    "vector less one": ((3, 127), 1),
    "vector": ((3, 128), 1),
    "vector and one": ((3, 129), 1),
    "power of two less one": ((5, 1023), 1),
    "power of two and one": ((5, 1025), 1),
    "rank 3": ((2, 3, 17), 1),
    "two dimensions": ((2, 3, 5, 7), 2),
    "all dimensions": ((3, 4, 5), 3),
    "rank 9": ((2, 1, 2, 3, 1, 2, 1, 2, 3), 4),
    "many narrow rows": ((4099, 3), 1),
    "long rows": ((3, 20001), 1),
    "threads": ((513, 260), 1),
}


# Rows of 2 to 64 KiB in half precision, and from one row to as many as still leave a GPU unfilled.
BENCH_SHAPES = ((32768, 1024), (32768, 4096), (16384, 8192), (8192, 32768))
SMALL_SHAPES = tuple((rows, 4096) for rows in (1, 8, 64, 512))


class Kind(NamedTuple):
    """Which of the four."""

    name: str
    centered: bool
    residual: bool

    @property
    def first(self) -> int:
        """The position of normalized_shape, before which there are x and residual."""
        return 1 + self.residual

    @property
    def parameters(self) -> int:
        """How many there are: weight, and bias with a mean."""
        return 1 + self.centered


class Arguments(NamedTuple):
    """The arguments of a call by their names."""

    x: Tensor
    residual: Tensor | None
    dims: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float

    @classmethod
    def of(cls, kind: Kind, *args: Any, **kwargs: Any) -> Arguments:
        """Those of a call of one of the four."""
        names = ("x", *(("residual",) if kind.residual else ()), "normalized_shape", "weight")
        names += ("bias", "eps") if kind.centered else ("eps",)
        given = dict(zip(names, args, strict=False)) | kwargs
        x = given["x"]
        eps = given.get("eps", 1e-5 if kind.centered else None)
        if eps is None:
            # A float64 copy of a call has that of the call: see `inputs`.
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        return cls(
            x=x,
            residual=given.get("residual"),
            dims=tuple(range(-len(given["normalized_shape"]), 0)),
            weight=given.get("weight"),
            bias=given.get("bias"),
            eps=eps,
            offset=given.get("offset", 0.0),
        )

    @property
    def z(self) -> Tensor:
        """What is normalized."""
        return self.x if self.residual is None else self.x + self.residual

    @property
    def factor(self) -> Tensor | None:
        """What the normed rows are multiplied by."""
        return None if self.weight is None else self.weight + self.offset


def with_sum(a: Arguments, y: Tensor, z: Tensor) -> Result:
    """What the op returns: the sum only where there is a residual."""
    return y if a.residual is None else (y, z)


def reference(kind: Kind, *args: Any, **kwargs: Any) -> Result:
    """The formula."""
    a = Arguments.of(kind, *args, **kwargs)
    z = a.z
    from_mean = z - z.mean(a.dims, keepdim=True) if kind.centered else z
    y = from_mean * ((from_mean * from_mean).mean(a.dims, keepdim=True) + a.eps).rsqrt()
    if a.factor is not None:
        y = y * a.factor
    if a.bias is not None:
        y = y + a.bias
    return with_sum(a, y, z)


def composite(kind: Kind, *args: Any, **kwargs: Any) -> Result:
    """Torch's own norm, behind torch's own sum."""
    a = Arguments.of(kind, *args, **kwargs)
    z, weight, bias = a.z, a.weight if a.offset == 0 else a.factor, a.bias
    shape = [z.shape[d] for d in a.dims]
    parameter = weight if weight is not None else bias
    # CUDA knows no two dtypes in one call.
    wide = z if parameter is None else z.to(parameter.dtype)
    if kind.centered:
        y = F.layer_norm(wide, shape, weight, bias, a.eps)
    else:
        y = F.rms_norm(wide, shape, weight, a.eps)
    return with_sum(a, y.to(z.dtype), z)


class Terms(NamedTuple):
    """Of the normed rows n: |n|, what rounding does to n, and to 1 / spread."""

    size: Tensor
    error: Tensor
    rstd: Tensor


def terms_of(kind: Kind, a: Arguments) -> Terms:
    """In units of the rounding step.

    Far from zero, or where a row hardly varies, the difference from the mean has a rounding error
    of the size of its terms; the spread has that of the differences.
    """
    with torch.no_grad():
        z = a.z if a.residual is None else a.x.abs() + a.residual.abs()
        mean = a.z.mean(a.dims, keepdim=True)
        from_mean = a.z - mean if kind.centered else a.z
        rstd = ((from_mean * from_mean).mean(a.dims, keepdim=True) + a.eps).rsqrt()
        size = from_mean.abs() * rstd
        moved = (z.abs() + (z.abs().mean(a.dims, keepdim=True) if kind.centered else 0)) * rstd
        spread = 1 + (size * moved).mean(a.dims, keepdim=True)
        return Terms(size, moved + size * spread, rstd * spread)


def magnitude(kind: Kind, *args: Any, **kwargs: Any) -> Result:
    """The terms of each element."""
    a = Arguments.of(kind, *args, **kwargs)
    y = terms_of(kind, a).error
    if a.weight is not None:
        y = y * (a.weight.abs() + abs(a.offset))
    if a.bias is not None:
        y = y + a.bias.abs()
    return with_sum(a, y, a.z if a.residual is None else a.x.abs() + a.residual.abs())


def gradient_magnitude(kind: Kind, *args: Any, **kwargs: Any) -> Result:
    """A function whose gradients are d + mean of d + n * mean of d * n, with all signs taken away.

    d is the incoming gradient times the weight; one n at a time has its rounding error.
    """
    a = Arguments.of(kind, *args, **kwargs)
    n = terms_of(kind, a)
    z = a.z

    def mean(t: Tensor) -> Tensor:
        return t.mean(a.dims, keepdim=True)

    y = z + mean(z) + n.error * mean(n.size * z) + n.size * mean(n.error * z)
    y = y * n.rstd
    if a.weight is not None:
        y = y * (a.weight.detach().abs() + abs(a.offset)) + a.weight * n.error
    if a.bias is not None:
        y = y + a.bias
    return with_sum(a, y, z)


def sensitivity(kind: Kind, *args: Any, **kwargs: Any) -> Result:
    """The gradients move with the rounded sum as with any other error of a normed row.

    The part that the sum passes on unchanged does not move.
    """
    y, total = gradient_magnitude(kind, *args, **kwargs)
    return y, 0 * total


def operands(kind: Kind, x: Tensor) -> tuple[Tensor, ...]:
    """x, and a residual of the same shape."""
    if not kind.residual:
        return (x,)
    return x, normal("residual", x.shape, x.device, x.dtype)


def parameters(
    kind: Kind, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Weight, and bias with a mean."""
    return tuple(normal(key, shape, device, dtype) for key in ("weight", "bias"))[: kind.parameters]


def inputs(kind: Kind, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every shape with all parameters, then fewer of them, settings, and mixed dtypes."""
    # The default eps of RMS norm depends on the dtype, and the truth is computed in another: but
    # for one sample each call has its own.
    eps = {"eps": torch.finfo(torch.float32).eps} if not kind.centered else {}
    for name, (shape, count) in SHAPES.items():
        x = normal("x", shape, device, dtype)
        last = shape[len(shape) - count :]
        yield Sample(name, (*operands(kind, x), last, *parameters(kind, last, device, dtype)), eps)
    x = normal("x", (5, 21), device, dtype)
    both = parameters(kind, (21,), device, dtype)
    rows = operands(kind, x)
    yield Sample("size in a list", (*rows, [21], *both), eps)
    yield Sample("no weight", (*rows, (21,)), eps)
    yield Sample("all by position", (*rows, (21,), *both, 1e-3))
    if kind.centered:
        yield Sample("defaults", (*rows, (21,), *both))
        yield Sample("weight alone", (*rows, (21,), both[0]))
        yield Sample("bias alone", (*rows, (21,), None, both[1]), {"eps": 1e-6})
    else:
        yield Sample("offset", (*rows, (21,), *both), {"offset": 1.0, "eps": 1e-6})
        yield Sample("offset without weight", (*rows, (21,), None, 1e-6), {"offset": 1.0})
    if dtype in (torch.float16, torch.bfloat16):
        for name, shape in (("float32 weight", (9, 21)), ("float32 weight, rows", (1031, 67))):
            wide = parameters(kind, shape[1:], device, torch.float32)
            x = normal("x", shape, device, dtype)
            yield Sample(name, (*operands(kind, x), shape[1:], *wide), eps)


def grown(kind: Kind, sample: Sample) -> Sample:
    """Twice the rows: the sizes of a row are an argument of the call, too."""
    first = kind.first
    shape = sample.args[first]
    rows = tuple(t.repeat([2, *[1] * (t.dim() - 1)]) for t in sample.args[:first])
    return replace(sample, args=(*rows, shape, *sample.args[first + 1 :]))


def bench(
    kind: Kind,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    weight_dtype: torch.dtype | None = None,
) -> Sample:
    """A matrix, and as many parameters as the op takes."""
    rows = [torch.randn(shape, device=device, dtype=dtype) for _ in range(kind.first)]
    last = shape[1:]
    kept = [
        torch.randn(last, device=device, dtype=weight_dtype or dtype)
        for _ in range(kind.parameters)
    ]
    return Sample("bench", (*rows, last, *kept))


def bench_variants(
    kind: Kind, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    """Half precision beside parameters in float32, as in training with a master copy."""
    if dtype in (torch.float16, torch.bfloat16):
        yield "float32 weight", bench(kind, device, dtype, shape, torch.float32)


def large(kind: Kind, device: torch.device) -> Sample:
    """A matrix of more than 2**31 elements, whose rows differ by more than an offset and a factor.

    The residual is one row seen as often.
    """
    rows, columns = 2**16 + 1, 2**15 + 1

    def cycle(count: int, length: int) -> Tensor:
        return torch.arange(count, device=device).remainder(length).to(torch.bfloat16) / length

    x = torch.outer(cycle(rows, 251), cycle(columns, 241)).add_(cycle(columns, 199))
    residual = [cycle(columns, 113).expand_as(x)] if kind.residual else []
    kept = [cycle(columns, length) for length in (127, 131)][: kind.parameters]
    return Sample("large", (x, *residual, (columns,), *kept))


def traffic(kind: Kind, sample: Sample) -> Traffic:
    """Reads all tensors, writes the normed rows, and the sum where there is one."""
    x = sample.args[0]
    read = sum(sample.args[i].numel() * sample.args[i].itemsize for i in sample.positions)
    written = kind.first * x.numel() * x.itemsize
    return Traffic(read + written, 6 * x.numel())


def backward_traffic(kind: Kind, sample: Sample) -> Traffic:
    """Reads the incoming gradients and what was normalized, writes the gradient of x.

    Reads the weight and writes the gradients of the parameters, too.
    """
    x = sample.args[0]
    kept = [sample.args[i] for i in sample.positions if i > kind.first]
    row = sum(t.numel() * t.itemsize for t in (*kept, *kept[:1]))
    return Traffic((2 + kind.first) * x.numel() * x.itemsize + row, 10 * x.numel())


MODULES: dict[str, type[nn.Module]] = {
    "layer_norm": torchkiln.nn.LayerNorm,
    "rms_norm": torchkiln.nn.RMSNorm,
    "add_layer_norm": torchkiln.nn.AddLayerNorm,
    "add_rms_norm": torchkiln.nn.AddRMSNorm,
}


def module(kind: Kind, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A module with parameters that are neither 0 nor 1."""
    offset = {} if kind.centered else {"offset": 0.5}
    layer = MODULES[kind.name](21, 1e-4, device=device, dtype=dtype, **offset)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(normal(name, (21,), device, dtype))
    return layer


def module_inputs(kind: Kind, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows for :func:`module`."""
    return operands(kind, normal("x", (9, 21), device, dtype))


def norm(name: str, *, centered: bool, residual: bool) -> OpSpec:
    """The contract of one of the four."""
    kind = Kind(name, centered, residual)
    first = kind.first
    return OpSpec(
        name=name,
        op=getattr(torchkiln, name),
        overload=getattr(torch.ops.torchkiln, name).default,
        reference=partial(reference, kind),
        composite=partial(composite, kind),
        magnitude=partial(magnitude, kind),
        gradient_magnitude=partial(gradient_magnitude, kind),
        output_sensitivity=partial(sensitivity, kind) if residual else None,
        inputs=partial(inputs, kind),
        invalid=partial(invalid, name, centered=centered, residual=residual),
        bench=partial(bench, kind),
        bench_variants=partial(bench_variants, kind),
        bench_shapes=BENCH_SHAPES,
        small_shapes=SMALL_SHAPES,
        large=partial(large, kind),
        traffic=partial(traffic, kind),
        backward_traffic=partial(backward_traffic, kind),
        differentiable=(*range(first), *range(first + 1, first + 1 + kind.parameters)),
        opaque=True,
        grown=partial(grown, kind),
        helpers=("add_norm_forward" if residual else "norm_forward", "norm_backward"),
        module=partial(module, kind),
        module_inputs=partial(module_inputs, kind),
    )


LAYER_NORM = norm("layer_norm", centered=True, residual=False)
RMS_NORM = norm("rms_norm", centered=False, residual=False)
ADD_LAYER_NORM = norm("add_layer_norm", centered=True, residual=True)
ADD_RMS_NORM = norm("add_rms_norm", centered=False, residual=True)
