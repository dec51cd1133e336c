"""The contracts of softmax and its logarithm."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.testing.compare import depth
from torchkiln.testing.data import normal
from torchkiln.testing.spec import Invalid, OpSpec, Sample, Traffic
from torchkiln.testing.specs.activation import FLOATING, SPARSE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Shapes and dimensions: rows of every kind that kernels treat differently, columns and what has
# dimensions on either side.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "typical": ((6, 10), 1),
    "columns": ((6, 10), 0),
    "one": ((1,), 0),
    "0-dim": ((), -1),
    "of one": ((5, 1), 1),
    "no rows": ((0, 5), 1),
    "no columns": ((5, 0), 1),
    "empty in the middle": ((3, 0, 2), 0),
    "prime": ((7, 13), -1),
    "vector less one": ((9, 127), 1),
    "vector": ((9, 128), 1),
    "vector and one": ((9, 129), 1),
    "power of two less one": ((5, 1023), 1),
    "power of two": ((5, 1024), 1),
    "power of two and one": ((5, 1025), 1),
    "tiny rows": ((301, 3), 1),
    "narrow columns": ((301, 3), 0),
    "middle": ((5, 6, 7), 1),
    "wide middle": ((3, 5, 130), 1),
    "images": ((2, 3, 5, 7), -3),
    "rank 9": ((2, 1, 2, 3, 1, 2, 1, 2, 3), 3),
    "long rows": ((3, 17001), 1),
    "very long row": ((140001,), 0),
    "many rows": ((2053, 37), 1),
}


def mask(key: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """True in most places."""
    return normal(key, shape, device) > -0.5


def inputs(log: bool, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Shapes and dimensions, then scales and masks."""
    for name, (shape, dim) in SHAPES.items():
        yield Sample(name, (2 * normal("x", shape, device, dtype), dim))
    x = 2 * normal("x", (4, 5, 6), device, dtype)
    for scale in (0.25, -1.5):
        yield Sample(f"times {scale}", (x, 2), {"scale": scale})
    # Their first element takes part in every row, so that none is without any.
    for name, shape in {"whole": (4, 5, 6), "broadcast": (5, 6), "each row": (4, 1, 6)}.items():
        kept = mask("mask", shape, device)
        kept[..., 0] = True
        yield Sample(f"mask, {name}", (x, -1), {"mask": kept, "scale": 0.5})
    columns = mask("mask", (4, 5, 1), device)
    columns[:, 0] = True
    yield Sample("mask of the middle", (x, 1), {"mask": columns})
    yield Sample("causal", (x, -1), {"causal": True})
    if not log:  # differences of -inf are no numerical derivative
        few = 2 * normal("x", (5, 6), device, dtype)
        yield Sample("causal, few", (few, 1), {"causal": True})
    yield Sample(
        "causal, more queries", (2 * normal("x", (2, 9, 4), device, dtype), 2), {"causal": True}
    )
    yield Sample("causal, more keys", (x, 2), {"causal": True, "scale": 0.3})
    both = mask("mask", (5, 6), device)
    both[:, 0] = True
    yield Sample("causal and mask", (x, 2), {"causal": True, "mask": both})
    # Of more elements than opcheck looks at, which takes NaN for a difference.
    wide = 2 * normal("x", (9, 21), device, dtype)
    none = mask("mask", (9, 21), device)
    none[3] = False
    yield Sample("a row without any", (wide, 1), {"mask": none})
    long = 2 * normal("x", (3, 2, 2049), device, dtype)
    yield Sample("long masked rows", (long, 2), {"mask": mask("mask", (2, 2049), device)})
    yield Sample("long causal rows", (long, 2), {"causal": True})


def invalid(name: str, device: torch.device) -> Iterator[Invalid]:
    """Every refusal."""
    prefix = rf"torchkiln\.{name}: "
    x = torch.ones(2, 4, device=device)

    def case(
        title: str,
        message: str,
        *args: object,
        error: type[Exception] = RuntimeError,
        **kwargs: Any,
    ) -> Invalid:
        return Invalid(title, args, error, prefix + message, kwargs)

    yield case("None", r"x: got NoneType, expected a torch\.Tensor", None, 0, error=TypeError)
    for dim in (2, -3):
        yield case(
            f"dimension {dim}",
            f"dim: got {dim}, expected a number from -2 to 1: x has 2 dimensions",
            x,
            dim,
            error=IndexError,
        )
    yield case(
        "0-dim",
        "dim: got 1, expected a number from -1 to 0: x has 0 dimensions",
        x[0, 0],
        1,
        error=IndexError,
    )
    for dtype in (torch.int64, torch.bool, torch.complex64):
        said = str(dtype).removeprefix("torch.")
        yield case(said, f"x: got dtype {said}, {FLOATING}", x.to(dtype), 1)
    yield case("sparse", "x: " + SPARSE, x.to_sparse(), 1)
    kept = x > 0
    for shape in ((3,), (2, 1, 4), (2, 3), (4, 2)):
        said = ", ".join(map(str, shape))
        yield case(
            f"mask of shape {said}",
            rf"mask: got shape \[{said}\], expected one that broadcasts to \[2, 4\], the shape of "
            "x",
            x,
            1,
            mask=torch.ones(shape, device=device, dtype=torch.bool),
        )
    for dtype in (torch.float32, torch.uint8):
        said = str(dtype).removeprefix("torch.")
        yield case(
            f"{said} mask",
            f"mask: got dtype {said}, expected bool, true where an element takes part",
            x,
            1,
            mask=x.to(dtype),
        )
    yield case(
        "meta mask",
        f"mask: got device meta, expected {x.device}, the device of x",
        x,
        1,
        mask=kept.to("meta"),
    )
    yield case("sparse mask", "mask: " + SPARSE, x, 1, mask=kept.to_sparse())
    if device.type != "cpu":
        yield case(
            "mask on the CPU",
            f"mask: got device cpu, expected {x.device}, the device of x",
            x,
            1,
            mask=kept.cpu(),
        )
    yield case(
        "causal along the queries",
        "causal: got dim 0, expected 1, the last dimension of x, that of the keys",
        x,
        0,
        error=ValueError,
        causal=True,
    )
    yield case(
        "causal row",
        r"causal: got x with 1 dimensions, expected at least 2, the last of which are "
        r"\[queries, keys\]",
        x[0],
        0,
        error=ValueError,
        causal=True,
    )


def masked(
    x: Tensor, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """``x * scale``, and -infinity where nothing takes part."""
    z = x * scale if scale != 1.0 else x
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf)
    if causal:
        later = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        z = z.masked_fill(later, -math.inf)
    return z


def composite(
    function: Callable[[Tensor, int], Tensor], x: Tensor, dim: int, **kwargs: Any
) -> Tensor:
    """What a user would write."""
    return function(masked(x, **kwargs), dim)


def shares(x: Tensor, dim: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The softmax, and its terms: a rounding of the exponent counts by the exponent's size."""
    with torch.no_grad():
        z = masked(x, **kwargs)
        sizes = torch.where(z.isinf(), 0.0, z.abs())
        if sizes.numel() > 0:
            sizes = sizes + (sizes.amax(dim, keepdim=True) if sizes.dim() > 0 else sizes)
        share = torch.softmax(z, dim).nan_to_num()
        return share, share * (1 + sizes)


def length(x: Tensor, dim: int) -> int:
    """How many terms a sum has."""
    return x.shape[dim] if x.dim() > 0 else 1


def magnitude(log: bool, x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    """The exponent's size and the sum's roundings move a softmax relatively, its log absolutely."""
    share, terms = shares(x, dim, **kwargs)
    moved = terms + share * depth(length(x, dim))
    return torch.where(share > 0, moved / share, 0.0) if log else moved


def gradient_magnitude(
    log: bool, x: Tensor, dim: int, *, scale: float = 1.0, **kwargs: Any
) -> Tensor:
    """A function whose gradients are the sums of the absolute values of the terms."""
    _, terms = shares(x, dim, scale=scale, **kwargs)
    moved = x * abs(scale)
    mixed = (terms * moved).sum(dim, keepdim=True) * depth(length(x, dim))
    return moved + mixed if log else terms * (moved + mixed)


def output_sensitivity(
    log: bool, x: Tensor, dim: int, *, scale: float = 1.0, **kwargs: Any
) -> Tensor:
    """How far each gradient moves with a relative error of the output that it is computed from."""
    share, _ = shares(x, dim, scale=scale, **kwargs)
    moved = x * abs(scale)
    if log:
        sizes = -share * torch.where(share > 0, share.log(), 0.0)
        return (sizes * moved).sum(dim, keepdim=True).expand_as(x)
    return share * (moved + 2 * (share * moved).sum(dim, keepdim=True))


def bench(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
    """The rows of a matrix."""
    return Sample("bench", (torch.randn(shape, device=device, dtype=dtype), -1))


def large(device: torch.device) -> Sample:
    """A matrix of more than 2**31 elements."""
    rows, columns = 2**16 + 1, 2**15 + 1
    row = torch.arange(columns, device=device).remainder(241).div(60)
    factor = torch.arange(rows, device=device).remainder(7).sub(3)
    x = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    torch.mul(factor.to(x.dtype).unsqueeze(1), row.to(x.dtype), out=x)
    return Sample("large", (x, 1))


def traffic(sample: Sample) -> Traffic:
    """Reads x, writes y."""
    x = sample.args[0]
    return Traffic(2 * x.numel() * x.itemsize, 5 * x.numel())


def backward_traffic(sample: Sample) -> Traffic:
    """Reads the incoming gradient and y, writes that of x."""
    x = sample.args[0]
    return Traffic(3 * x.numel() * x.itemsize, 4 * x.numel())


def module_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows for the modules."""
    return (normal("x", (3, 9, 21), device, dtype),)


def spec(
    name: str, function: Callable[[Tensor, int], Tensor], log: bool, module: type[nn.Module]
) -> OpSpec:
    """The contract of what torch's ``function`` is without scale and mask."""
    return OpSpec(
        name=name,
        op=getattr(torchkiln, name),
        overload=getattr(torch.ops.torchkiln, name).default,
        reference=functools.partial(composite, function),
        composite=functools.partial(composite, function),
        magnitude=functools.partial(magnitude, log),
        gradient_magnitude=functools.partial(gradient_magnitude, log),
        output_sensitivity=functools.partial(output_sensitivity, log),
        inputs=functools.partial(inputs, log),
        invalid=functools.partial(invalid, name),
        bench=bench,
        large=large,
        traffic=traffic,
        backward_traffic=backward_traffic,
        differentiable=(0,),
        opaque=True,
        bench_shapes=((32768, 4096), (8192, 32768), (8192, 131072)),
        small_shapes=((1, 4096), (8, 4096), (64, 4096), (512, 4096)),
        helpers=("softmax_backward",),
        module=lambda *_: module(-1, scale=0.5, causal=True),
        module_inputs=module_inputs,
    )


SOFTMAX = spec("softmax", torch.softmax, False, torchkiln.nn.Softmax)
LOG_SOFTMAX = spec("log_softmax", torch.log_softmax, True, torchkiln.nn.LogSoftmax)
