"""The contracts of the norms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from torchkiln.testing.data import cycle, large_matrix, normal
from torchkiln.testing.derive import layer
from torchkiln.testing.forms import Given, Written, form_of, with_forms
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Result, Sample, Traffic
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.quantize import quantising

# Shapes of x, and numbers of last sizes that are normalized together: one row and one column, no
# row and no column, every vector tail, narrow and long rows, many rows (the gradients of weight and
# bias are sums over rows).
SHAPES: Mapping[str, tuple[tuple[int, ...], int]] = (
    {"typical": ((6, 10), 1), "one": ((1,), 1), "one row": ((37,), 1), "one column": ((41, 1), 1)}
    | {"no rows": ((0, 5), 1), "no columns": ((5, 0), 1), "empty in the middle": ((3, 0, 4), 2)}
    | {"prime": ((7, 13), 1), "vector less one": ((3, 127), 1), "vector": ((3, 128), 1)}
    | {"vector and one": ((3, 129), 1), "power of two less one": ((5, 1023), 1)}
    | {"power of two and one": ((5, 1025), 1), "rank 3": ((2, 3, 17), 1)}
    | {"two dimensions": ((2, 3, 5, 7), 2), "all dimensions": ((3, 4, 5), 3)}
    | {"rank 9": ((2, 1, 2, 3, 1, 2, 1, 2, 3), 4), "many narrow rows": ((4099, 3), 1)}
    | {"long rows": ((3, 20001), 1), "threads": ((513, 260), 1)}
)


# Rows of 2 to 64 KiB in half precision; then rows that are too few to fill a GPU.
BENCH_SHAPES = ((32768, 1024), (32768, 4096), (16384, 8192), (8192, 32768))
SMALL_SHAPES = tuple((rows, 4096) for rows in (1, 8, 64, 512))


class Kind(NamedTuple):
    """The properties of one of the four norms."""

    name: str
    centered: bool
    residual: bool

    @property
    def first(self) -> int:
        """The position of normalized_shape, after x and residual."""
        return 1 + self.residual

    @property
    def owned(self) -> tuple[str, ...]:
        """The parameters: weight, and bias for the norms with a mean."""
        return ("weight", "bias") if self.centered else ("weight",)


class Arguments:
    """The arguments of a call by name."""

    def __init__(self, kind: Kind, *args: Any, **kwargs: Any) -> None:
        names = (*("x", "residual")[: kind.first], "normalized_shape", *kind.owned, "eps")
        given = dict(zip(names, args, strict=False)) | kwargs
        self.x: Tensor = given["x"]
        self.residual: Tensor | None = given.get("residual")
        self.dims = tuple(range(-len(given["normalized_shape"]), 0))
        self.weight: Tensor | None = given.get("weight")
        self.bias: Tensor | None = given.get("bias")
        self.offset: float = given.get("offset", 0.0)
        self.rounds = given.get("round") == "input"
        # A float64 copy of a call has another default for eps: see `inputs`.
        inside = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        eps = given.get("eps", 1e-5 if kind.centered else None)
        self.eps: float = torch.finfo(inside).eps if eps is None else eps

    @property
    def z(self) -> Tensor:
        """The rows to be normalized."""
        return self.x if self.residual is None else self.x + self.residual

    @property
    def sizes(self) -> Tensor:
        """The sum of the absolute values of the terms of z."""
        return self.z if self.residual is None else self.x.abs() + self.residual.abs()

    @property
    def factor(self) -> Tensor | None:
        """The factor of the normalized rows: ``weight + offset``; None without a weight."""
        return None if self.weight is None else self.weight + self.offset


def with_sum(a: Arguments, y: Tensor, z: Tensor) -> Result:
    """The outputs of the op: the norm, and the sum if there is a residual."""
    return y if a.residual is None else (y, z)


def reference(kind: Kind, *args: Any, **kwargs: Any) -> Result:
    """The formula of the op in plain torch."""
    a = Arguments(kind, *args, **kwargs)
    z = a.z
    from_mean = z - z.mean(a.dims, keepdim=True) if kind.centered else z
    y = from_mean * ((from_mean * from_mean).mean(a.dims, keepdim=True) + a.eps).rsqrt()
    if a.factor is not None:
        y = y * a.factor
    if a.bias is not None:
        y = y + a.bias
    return with_sum(a, y, z)


def composite(kind: Kind, *args: Any, **kwargs: Any) -> Result:
    """Torch's sum and norm."""
    a = Arguments(kind, *args, **kwargs)
    z, weight, bias = a.z, a.weight if a.offset == 0 else a.factor, a.bias
    shape = [z.shape[d] for d in a.dims]
    parameter = weight if weight is not None else bias

    def torchs(z: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if kind.centered:
            return F.layer_norm(z, shape, weight, bias, a.eps)
        return F.rms_norm(z, shape, weight, a.eps)

    if a.rounds:
        y = torchs(z)
        y = y if weight is None else y * weight
        return with_sum(a, (y if bias is None else y + bias).to(z.dtype), z)
    # Torch's CUDA kernels require the same dtype for all arguments.
    wide = z if parameter is None else z.to(parameter.dtype)
    return with_sum(a, torchs(wide, weight, bias).to(z.dtype), z)


class Terms(NamedTuple):
    """|n| for the normalized rows n, and the rounding errors of n and of rstd.

    The unit of the errors is that of ``compare.allowed_error``: two rounding steps of the dtype
    that the op computes in.
    """

    size: Tensor
    error: Tensor
    rstd: Tensor


def terms_of(kind: Kind, a: Arguments, z: Tensor) -> Terms:
    """Rounding errors of the normalized rows; ``z`` is the magnitude of ``a.z``.

    A difference from the mean has the errors of its terms.
    """
    with torch.no_grad():
        mean = a.z.mean(a.dims, keepdim=True)
        from_mean = a.z - mean if kind.centered else a.z
        rstd = ((from_mean * from_mean).mean(a.dims, keepdim=True) + a.eps).rsqrt()
        size = from_mean.abs() * rstd
        moved = (z.abs() + (z.abs().mean(a.dims, keepdim=True) if kind.centered else 0)) * rstd
        spread = 1 + (size * moved).mean(a.dims, keepdim=True)
        return Terms(size, moved + size * spread, rstd * spread)


def magnitude(kind: Kind, *args: Any, **kwargs: Any) -> Result:
    """The magnitude of each element's terms, to which its rounding error is proportional."""
    a = Arguments(kind, *args, **kwargs)
    y = terms_of(kind, a, a.sizes).error
    if a.weight is not None:
        y = y * (a.weight.abs() + abs(a.offset))
    if a.bias is not None:
        y = y + a.bias.abs()
    return with_sum(a, y, a.sizes)


def intermediate_sensitivity(kind: Kind, *args: Any, **kwargs: Any) -> Result:
    """The effect of rounding z, if it is a sum, and of rounding the normalized rows."""
    a = Arguments(kind, *args, **kwargs)
    n = terms_of(kind, a, a.z.abs())
    y = n.error * kind.residual + n.size * a.rounds
    if a.factor is not None:
        y = y * a.factor.abs()
    return with_sum(a, y, 0 * a.sizes)


def gradient_magnitude(kind: Kind, *args: Any, **kwargs: Any) -> Result:
    """A function whose gradients are |d| + mean |d| + |n| mean |d n|, for d the gradient of n.

    The rounding errors of n are applied to one factor n at a time.
    """
    a = Arguments(kind, *args, **kwargs)
    n = terms_of(kind, a, a.sizes)
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
    """The effect of the rounded sum on gradients, except on the one that passes through the sum."""
    y, total = gradient_magnitude(kind, *args, **kwargs)
    return y, 0 * total


def arguments(
    kind: Kind,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    count: int = 1,
    owned: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """A call that normalizes the last ``count`` sizes, with parameters of dtype ``owned``."""
    last = shape[len(shape) - count :]
    rows = [normal(name, shape, device, dtype) for name in ("x", "residual")[: kind.first]]
    return (*rows, last, *(normal(name, last, device, owned or dtype) for name in kind.owned))


def inputs(kind: Kind, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape and all parameters, then fewer parameters, settings, mixed dtypes."""
    # The default eps of RMS norm depends on the dtype, and the truth is computed in float64, so all
    # calls except one pass eps.
    eps = {} if kind.centered else {"eps": torch.finfo(torch.float32).eps}
    for name, (shape, count) in SHAPES.items():
        yield Sample(name, arguments(kind, shape, device, dtype, count=count), eps)
    args = arguments(kind, (5, 21), device, dtype)
    rows, owned = args[: kind.first], args[kind.first + 1 :]
    yield Sample("size in a list", (*rows, [21], *owned), eps)
    yield Sample("no weight", (*rows, (21,)), eps)
    yield Sample("all by position", (*args, 1e-3))
    if kind.centered:
        yield Sample("defaults", args)
        yield Sample("weight alone", (*rows, (21,), owned[0]))
        yield Sample("bias alone", (*rows, (21,), None, owned[1]), {"eps": 1e-6})
    without = (*rows, (21,), *[None] * len(owned))
    yield Sample("offset", args, {"offset": 1.0, "eps": 1e-6})
    yield Sample("offset without weight", without, {"offset": 1.0, "eps": 1e-6})
    yield Sample("rounded", args, {"offset": 1.0, "round": "input", "eps": 1e-6})
    if dtype in (torch.float16, torch.bfloat16):
        for name, shape in (("float32 weight", (9, 21)), ("float32 weight, rows", (1031, 67))):
            args = arguments(kind, shape, device, dtype, owned=torch.float32)
            yield Sample(name, args, eps)
            yield Sample(f"rounded, {name}", args, eps | {"round": "input"})
        if kind.residual:
            x, residual, *others = arguments(kind, (9, 21), device, dtype)
            yield Sample("float32 residual", (x, residual.float(), *others), eps)
            yield Sample("float32 x", (x.float(), residual, *others), eps)
            x, residual, *others = arguments(kind, (9, 64), device, dtype, owned=torch.float32)
            yield Sample("float32 residual in vectors", (x, residual.float(), *others), eps)


def grown(kind: Kind, sample: Sample) -> Sample:
    """The call with twice the rows; the sizes of a row must equal ``normalized_shape``."""
    rows = (t.repeat([2, *[1] * (t.dim() - 1)]) for t in sample.args[: kind.first])
    return replace(sample, args=(*rows, *sample.args[kind.first :]))


def bench(kind: Kind, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """A call with matrices and the parameters of the op."""
    draw = partial(torch.randn, device=device, dtype=dtype)
    rows, owned = [draw(shape) for _ in range(kind.first)], [draw(shape[1:]) for _ in kind.owned]
    return Sample("bench", (*rows, shape[1:], *owned))


def bench_variants(
    kind: Kind, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> Iterator[tuple[str, Sample]]:
    """The benchmark call in half precision with float32 parameters, as with master weights."""
    if dtype in (torch.float16, torch.bfloat16):
        *rows, columns = bench(kind, device, dtype, shape).args[: kind.first + 1]
        owned = (torch.randn(columns, device=device) for _ in kind.owned)
        yield "float32 weight", Sample("bench", (*rows, columns, *owned))


def large(kind: Kind, device: torch.device) -> Sample:
    """A call on a matrix of more than 2**31 elements; the residual is one row, expanded."""
    x = large_matrix(device)
    columns = x.shape[1]
    residual = [cycle(columns, 113, device).expand_as(x)] if kind.residual else []
    owned = (cycle(columns, 127 + 4 * i, device) for i, _ in enumerate(kind.owned))
    return Sample("large", (x, *residual, (columns,), *owned))


def backward_traffic(kind: Kind, sample: Sample) -> Traffic:
    """Reads gradients, rows, weight; writes gradients, one of them for both x and residual."""
    x, *owned = (sample.args[i] for i in sample.positions if i != 1 or not kind.residual)
    row = sum(t.nbytes for t in (*owned, *owned[:1]))
    return Traffic((2 + kind.first) * x.nbytes + row, 10 * x.numel())


def invalid(kind: Kind, device: torch.device) -> Iterator[Invalid]:
    """Calls with shapes that are not the last sizes of x, numbers out of range, and two dtypes."""
    x, row = torch.ones(2, 3, 4, device=device), torch.ones(4, device=device)
    args = (*[x] * kind.first, (4,), *[row] * len(kind.owned))
    good = GoodCall(getattr(torch.ops.torchkiln, kind.name).default, Sample("good", args))
    for shape, expected in (
        ((), "at least 1 dimension"),
        ((3,), "[4], the last dimension of x"),
        ((1,), "[4], the last dimension of x"),
        ((2, 4), "[3, 4], the last 2 dimensions of x"),
        ((-1,), "[4], the last dimension of x"),
        ((1, 2, 3, 4), "the last sizes of x, which has shape [2, 3, 4]"),
    ):
        words = f"normalized_shape: got {list(shape)}, expected {expected}"
        yield good.changed(words, normalized_shape=shape)
    for eps, said in ((-1e-5, "-1e-05"), (math.nan, "nan"), (-math.inf, "-inf")):
        yield good.changed(f"eps: got {said}, expected a number of at least 0", ValueError, eps=eps)
    words = "round: got 'up', expected one of once, input"
    yield good.changed(words, ValueError, round="up")
    if kind.centered:
        words = "bias: got dtype float32, expected bfloat16, the dtype of weight"
        yield good.cast(torch.bfloat16).changed(words, bias=row)


def norm(name: str, module: type[nn.Module], *, centered: bool, residual: bool) -> OpSpec:
    """The contract of one of the four norms."""
    kind = Kind(name, centered, residual)
    return OpSpec(
        op=getattr(torchkiln, name),
        reference=partial(reference, kind),
        composite=partial(composite, kind),
        magnitude=partial(magnitude, kind),
        gradient_magnitude=partial(gradient_magnitude, kind),
        intermediate_sensitivity=partial(intermediate_sensitivity, kind),
        output_sensitivity=partial(sensitivity, kind) if residual else None,
        inputs=partial(inputs, kind),
        refusals=Refusals(
            like={"residual": "x"} if residual else {},
            mixes=("residual",),
            parameters=dict.fromkeys(kind.owned, "x"),
            shapes=dict.fromkeys(kind.owned, "the normalized_shape"),
        ),
        invalid=partial(invalid, kind),
        bench=partial(bench, kind),
        bench_variants=partial(bench_variants, kind),
        bench_shapes=BENCH_SHAPES,
        small_shapes=SMALL_SHAPES,
        large=partial(large, kind),
        operations=(6, 10),
        backward_traffic=partial(backward_traffic, kind),
        opaque=True,
        grown=partial(grown, kind),
        helpers=("_add_norm_forward" if residual else "_norm_forward", "_norm_backward"),
        module=layer(module, 10, 1e-4, offset=0.5),
    )


def new_out(given: Given) -> Tensor:
    """A tensor for the argument ``out``."""
    x: Tensor = given["x"]
    return x.new_empty(x.shape)


def with_out(parent: OpSpec) -> OpSpec:
    """The norm with ``out=``. ``torch.ops`` refuses its arguments of wrong kinds."""
    overload = getattr(torch.ops.torchkiln, f"_{parent.name}_out").default
    function = Written(parent.op, overload, {"out": new_out}, plain=parent.op)
    return form_of(parent, function, called=parent.name, kinds=False)


def on_both(parent: OpSpec) -> OpSpec:
    """The norm of a sum that overwrites both addends, which have one dtype."""
    name = f"{parent.name}_"
    overload = getattr(torch.ops.torchkiln, name).default
    targets = {"x": None, "residual": None}
    function = Written(getattr(torchkiln, name), overload, targets, plain=parent.op)

    def same_dtypes(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        calls = parent.inputs(device, dtype)
        return (call for call in calls if call.args[0].dtype == call.args[1].dtype)

    return form_of(parent, function, kinds=False, inputs=same_dtypes)


def in_fp8(parent: OpSpec) -> OpSpec:
    """The norm in E4M3."""
    name = "_add_norm_fp8_forward" if "add" in parent.name else "_norm_fp8_forward"
    return quantising(parent, name, "_norm_backward")


LAYER_NORM = with_forms(
    norm("layer_norm", torchkiln.nn.LayerNorm, centered=True, residual=False), with_out, in_fp8
)
RMS_NORM = with_forms(
    norm("rms_norm", torchkiln.nn.RMSNorm, centered=False, residual=False), with_out, in_fp8
)
ADD_LAYER_NORM = with_forms(
    norm("add_layer_norm", torchkiln.nn.AddLayerNorm, centered=True, residual=True), on_both, in_fp8
)
ADD_RMS_NORM = with_forms(
    norm("add_rms_norm", torchkiln.nn.AddRMSNorm, centered=False, residual=True), on_both, in_fp8
)
