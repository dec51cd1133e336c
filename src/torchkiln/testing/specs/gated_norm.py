"""The contract of the gated RMS norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchkiln
from torchkiln.testing.data import cycle, large_matrix, normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.activation import FORMULAS
from torchkiln.testing.specs.norm import Terms

# Shapes of x, numbers of last sizes that are normalized together, and groups: one row and one
# column, no row and no column, vectors with tails, groups that are whole vectors or not, one warp,
# many and long rows.
SHAPES: Mapping[str, tuple[tuple[int, ...], int, int]] = {
    "one": ((1,), 1, 1),
    "one column": ((41, 1), 1, 1),
    "no rows": ((0, 6), 1, 3),
    "no columns": ((5, 0), 1, 1),
    "prime": ((7, 13), 1, 1),
    "vector": ((3, 128), 1, 1),
    "vector and one": ((3, 129), 1, 1),
    "two dimensions": ((2, 3, 5, 8), 2, 1),
    "all dimensions": ((3, 4, 5), 3, 1),
    "groups": ((2, 5, 48), 1, 3),
    "groups of one column": ((5, 7), 1, 7),
    "groups that are no vectors": ((9, 42), 1, 6),
    "groups of several warps": ((5, 4096), 1, 2),
    "many narrow rows": ((4099, 3), 1, 1),
    "many narrow groups": ((1031, 64), 1, 4),
    "long rows": ((3, 20001), 1, 1),
    "threads": ((513, 260), 1, 1),
}
BENCH_SHAPES = ((262144, 128), (32768, 1024), (32768, 4096), (16384, 8192))
SMALL_SHAPES = tuple((rows, 4096) for rows in (1, 8, 64, 512))
GROUPS = 8
SILU = FORMULAS["silu"]


class Arguments:
    """The arguments of a call by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = ("x", "gate", "normalized_shape", "weight", "eps")
        given = dict(zip(names, args, strict=False)) | kwargs
        self.x: Tensor = given["x"]
        self.gate: Tensor = given["gate"]
        self.dims = tuple(range(-len(given["normalized_shape"]), 0))
        self.weight: Tensor | None = given.get("weight")
        self.gate_first: bool = given.get("gate_first", False)
        self.groups: int = given.get("groups", 1)
        self.offset: float = given.get("offset", 0.0)
        self.dtype = torch.promote_types(self.x.dtype, self.gate.dtype)
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        eps = given.get("eps")
        self.eps: float = torch.finfo(self.wide).eps if eps is None else eps

    def mean(self, rows: Tensor) -> Tensor:
        """The mean of each group, which broadcasts to the rows."""
        if self.groups == 1:
            return rows.mean(self.dims, keepdim=True)
        means = rows.unflatten(-1, (self.groups, rows.shape[-1] // self.groups)).mean(-1)
        return means.repeat_interleave(rows.shape[-1] // self.groups, -1)

    def rstd(self, z: Tensor) -> Tensor:
        """1 / sqrt(mean of z^2 + eps)."""
        return (self.mean(z * z) + self.eps).rsqrt()

    def scaled(self, n: Tensor) -> Tensor:
        """The rows times ``weight + offset``."""
        return n if self.weight is None else n * (self.weight.to(n.dtype) + self.offset)

    def value(self, passed: Tensor) -> Tensor:
        """The formula, with ``passed`` for silu of the gate."""
        x = self.x.to(passed.dtype)
        z = x * passed if self.gate_first else x
        y = self.scaled(z * self.rstd(z))
        return y if self.gate_first else y * passed

    def terms(self) -> Terms:
        """The errors of the normalized rows, including the rounding of x times the gate."""
        with torch.no_grad():
            passed = SILU.exact(self.gate) if self.gate_first else 1
            z = self.x * passed
            rstd = self.rstd(z)
            moved = self.x.abs() * (SILU.terms(self.gate) if self.gate_first else 1) * rstd
            size = z.abs() * rstd
            spread = 1 + self.mean(size * moved)
            return Terms(size, moved + size * spread, rstd * spread)

    def weights(self) -> Tensor | float:
        """``|weight| + |offset|``; 1 without a weight."""
        return 1.0 if self.weight is None else self.weight.detach().abs() + abs(self.offset)


def reference(*args: Any, **kwargs: Any) -> Tensor:
    """The formula of the op in plain torch."""
    a = Arguments(*args, **kwargs)
    return a.value(SILU.exact(a.gate))


def composite(*args: Any, **kwargs: Any) -> Tensor:
    """The formula in float32, rounded at the end, as in models."""
    a = Arguments(*args, **kwargs)
    return a.value(SILU.value(a.gate.to(a.wide))).to(a.dtype)


def magnitude(*args: Any, **kwargs: Any) -> Tensor:
    """The magnitude of each element's terms, to which its rounding error is proportional."""
    a = Arguments(*args, **kwargs)
    y = a.terms().error * a.weights()
    return y if a.gate_first else y * SILU.terms(a.gate)


def gradient_magnitude(*args: Any, **kwargs: Any) -> Tensor:
    """A function whose gradients are the op's, with the absolute values of all terms.

    If d is the gradient of the normalized rows n, the gradient of the rows before the norm has the
    terms |d| + |n| mean |d n|, with the rounding errors of one factor n at a time.
    """
    a = Arguments(*args, **kwargs)
    n = a.terms()
    gate = a.gate.detach()
    passed, slope = SILU.terms(gate), SILU.slope_terms(gate)
    z = a.x * passed + a.gate * (a.x.detach().abs() * slope) if a.gate_first else a.x
    y = z + n.error * a.mean(n.size * z) + n.size * a.mean(n.error * z)
    y = y * n.rstd * a.weights()
    if not a.gate_first:
        y = y * passed + a.gate * (n.error * a.weights() * slope)
    if a.weight is not None:
        y = y + a.weight * (n.error if a.gate_first else n.error * passed)
    return y


def arguments(
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    count: int = 1,
    owned: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """A call that normalizes the last ``count`` sizes, with a weight of dtype ``owned``."""
    last = shape[len(shape) - count :]
    x, gate = (normal(name, shape, device, dtype) for name in ("x", "gate"))
    return (x, gate, last, normal("weight", last, device, owned or dtype))


def inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape, the gate before and after the norm; then settings and mixed dtypes."""
    # The default eps depends on the dtype, and the truth is computed in float64.
    options = {"eps": torch.finfo(torch.float32).eps}
    yield Sample("typical", arguments((6, 10), device, dtype), options)
    args = arguments((5, 24), device, dtype)
    yield Sample("size in a list", (*args[:2], [24], args[3]), options)
    yield Sample("all by position", (*args, 1e-3), {"gate_first": True})
    for first in (False, True):
        place = "gate first, " if first else ""
        more = options | {"gate_first": first}
        for name, (shape, count, groups) in SHAPES.items():
            call = arguments(shape, device, dtype, count=count)
            yield Sample(f"{place}{name}", call, more | {"groups": groups})
        yield Sample(f"{place}no weight", args[:3], more | {"groups": 2})
        yield Sample(f"{place}offset", args, more | {"offset": 1.0})
        yield Sample(f"{place}offset without weight", args[:3], more | {"offset": 1.0})
        if dtype in (torch.float16, torch.bfloat16):
            for name, shape in (("vectors", (9, 24)), ("rows", (1031, 67))):
                call = arguments(shape, device, dtype, owned=torch.float32)
                yield Sample(f"{place}float32 weight, {name}", call, more)
    other = torch.float32 if dtype.itemsize == 2 else torch.bfloat16
    x, gate, shape, weight = arguments((9, 21), device, dtype)
    yield Sample("two dtypes", (x, gate.to(other), shape, weight), options)


def grown(sample: Sample) -> Sample:
    """The call with twice the rows; the sizes of a row must equal ``normalized_shape``."""
    rows = (t.repeat([2, *[1] * (t.dim() - 1)]) for t in sample.args[:2])
    return replace(sample, args=(*rows, *sample.args[2:]))


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call with two matrices and a weight."""
    draw = partial(torch.randn, device=device, dtype=dtype)
    return Sample("bench", (draw(shape), draw(shape), shape[1:], draw(shape[1:])))


def bench_variants(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    """The benchmark call with the gate first, as in Mamba2, without and with groups."""
    call = bench(device, dtype, shape)
    yield "gate first", replace(call, kwargs={"gate_first": True})
    yield (
        "gate first, groups",
        replace(call, kwargs={"gate_first": True, "groups": math.gcd(GROUPS, shape[1])}),
    )


def large(device: torch.device) -> Sample:
    """A call with a matrix of more than 2**31 elements as x and as gate."""
    x = large_matrix(device)
    return Sample("large", (x, x, x.shape[1:], cycle(x.shape[1], 127, device)))


def invalid(device: torch.device) -> Iterator[Invalid]:
    """Calls with shapes that are not the last sizes of x, and with numbers out of range."""
    x, row = torch.ones(2, 3, 4, device=device), torch.ones(4, device=device)
    op = torch.ops.torchkiln.gated_rms_norm.default
    good = GoodCall(op, Sample("good", (x, x, (4,), row)))
    for shape, expected in (
        ((), "at least 1 dimension"),
        ((3,), "[4], the last dimension of x"),
        ((2, 4), "[3, 4], the last 2 dimensions of x"),
    ):
        words = f"normalized_shape: got {list(shape)}, expected {expected}"
        yield good.changed(words, normalized_shape=shape)
    for eps, said in ((-1e-5, "-1e-05"), (math.nan, "nan")):
        yield good.changed(f"eps: got {said}, expected a number of at least 0", ValueError, eps=eps)
    for groups in (3, 0, -2, 8):
        words = f"groups: got {groups}, expected a divisor of 4, the last size of x"
        yield good.changed(words, ValueError, groups=groups)
    words = "groups: got 2, expected 1 for a normalized_shape of 2 dimensions"
    yield good.changed(words, ValueError, normalized_shape=(3, 4), weight=x[0], groups=2)


GATED_RMS_NORM = OpSpec(
    op=torchkiln.gated_rms_norm,
    reference=reference,
    composite=composite,
    magnitude=magnitude,
    gradient_magnitude=gradient_magnitude,
    inputs=inputs,
    refusals=Refusals(
        like={"gate": "x"},
        mixes=("gate",),
        parameters={"weight": "x"},
        shapes={"weight": "the normalized_shape"},
    ),
    invalid=invalid,
    bench=bench,
    bench_variants=bench_variants,
    bench_shapes=BENCH_SHAPES,
    small_shapes=SMALL_SHAPES,
    large=large,
    operations=(12, 28),
    opaque=True,
    grown=grown,
    helpers=("_gated_rms_norm_forward", "_gated_rms_norm_backward"),
    module=layer(torchkiln.nn.GatedRMSNorm, 10, 1e-4, gate_first=True, offset=0.5),
)
