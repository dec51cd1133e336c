"""The contracts of softmax and its logarithm."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import torchkiln
from torchkiln.ops._traced import name_of
from torchkiln.testing.compare import depth
from torchkiln.testing.data import normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample
from torchkiln.testing.spec import OpSpec

Softmax = Callable[[Tensor, int], Tensor]

# Shapes and dimensions: rows for each kind of kernel, columns, dimensions in the middle.
SHAPES: Mapping[str, tuple[tuple[int, ...], int]] = (
    {"typical": ((6, 10), 1), "columns": ((6, 10), 0), "one": ((1,), 0), "0-dim": ((), -1)}
    | {"of one": ((5, 1), 1), "no rows": ((0, 5), 1), "no columns": ((5, 0), 1)}
    | {"empty in the middle": ((3, 0, 2), 0), "prime": ((7, 13), -1)}
    | {"vector less one": ((9, 127), 1), "vector": ((9, 128), 1), "vector and one": ((9, 129), 1)}
    | {"power of two less one": ((5, 1023), 1), "power of two": ((5, 1024), 1)}
    | {"power of two and one": ((5, 1025), 1), "tiny rows": ((301, 3), 1)}
    | {"narrow columns": ((301, 3), 0), "middle": ((5, 6, 7), 1), "wide middle": ((3, 5, 130), 1)}
    | {"images": ((2, 3, 5, 7), -3), "rank 9": ((2, 1, 2, 3, 1, 2, 1, 2, 3), 3)}
    | {"long rows": ((3, 17001), 1), "very long row": ((140001,), 0), "many rows": ((2053, 37), 1)}
)


def mask(key: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A mask that is mostly True."""
    return normal(key, shape, device) > -0.5


def inputs(log: bool, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls with each shape and dimension, then with scales and masks."""

    def values(*shape: int) -> Tensor:
        return 2 * normal("x", shape, device, dtype)

    for name, (shape, dim) in SHAPES.items():
        yield Sample(name, (values(*shape), dim))
    x = values(4, 5, 6)
    for scale in (0.25, -1.5):
        yield Sample(f"times {scale}", (x, 2), {"scale": scale})
    # The first element of each row is not masked, so that no row is empty.
    for name, shape in {"whole": (4, 5, 6), "broadcast": (5, 6), "each row": (4, 1, 6)}.items():
        kept = mask("mask", shape, device)
        kept[..., 0] = True
        yield Sample(f"mask, {name}", (x, -1), {"mask": kept, "scale": 0.5})
    columns = mask("mask", (4, 5, 1), device)
    columns[:, 0] = True
    yield Sample("mask of the middle", (x, 1), {"mask": columns})
    yield Sample("causal", (x, -1), {"causal": True})
    if not log:  # numerical derivatives of -inf are NaN
        yield Sample("causal, few", (values(5, 6), 1), {"causal": True})
    yield Sample("causal, more queries", (values(2, 9, 4), 2), {"causal": True})
    yield Sample("causal, more keys", (x, 2), {"causal": True, "scale": 0.3})
    both = mask("mask", (5, 6), device)
    both[:, 0] = True
    yield Sample("causal and mask", (x, 2), {"causal": True, "mask": both})
    # Enough elements that opcheck skips the sample: it would report NaN as a difference.
    none = mask("mask", (9, 21), device)
    none[3] = False
    yield Sample("a row without any", (values(9, 21), 1), {"mask": none})
    long = values(3, 2, 2049)
    yield Sample("long masked rows", (long, 2), {"mask": mask("mask", (2, 2049), device)})
    yield Sample("long causal rows", (long, 2), {"causal": True})


def invalid(name: str, device: torch.device) -> Iterator[Invalid]:
    """Calls with masks of wrong shapes and dtypes, and causal calls with a wrong dimension."""
    x = torch.ones(2, 4, device=device)
    good = GoodCall(getattr(torch.ops.torchkiln, name).default, Sample("good", (x, 1)))
    expected = "expected one that broadcasts to [2, 4], the shape of x"
    for shape in ((3,), (2, 1, 4), (2, 3), (4, 2)):
        mask = torch.ones(shape, device=device, dtype=torch.bool)
        yield good.changed(f"mask: got shape {list(shape)}, {expected}", mask=mask)
        yield good.changed(f"mask: got shape {list(shape)}, {expected}", mask=mask.float())
    expected = "expected bool (true: the element takes part) or a floating dtype (numbers to add)"
    for dtype in (torch.int64, torch.uint8):
        yield good.changed(f"mask: got dtype {name_of(dtype)}, {expected}", mask=x.to(dtype))
    words = "causal: got dim 0, expected 1, the last dimension of x: the keys"
    yield good.changed(words, ValueError, dim=0, causal=True)
    expected = "expected at least 2, the last of which are [queries, keys]"
    words = f"causal: got x with 1 dimensions, {expected}"
    yield good.changed(words, ValueError, x=x[0], dim=0, causal=True)


def masked(x: Tensor, *, scale: float = 1.0, mask: Any = None, causal: bool = False) -> Tensor:
    """``x * scale``, with -infinity for masked elements."""
    z = x * scale if scale != 1.0 else x
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf)
    if causal:
        later = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        z = z.masked_fill(later, -math.inf)
    return z


def reference(function: Softmax, x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    """The code that a user would write."""
    return function(masked(x, **kwargs), dim)


def shares(x: Tensor, dim: int, **kwargs: Any) -> tuple[Tensor, Tensor, float]:
    """The softmax, the rounding errors of the exponents, and the rounding errors of the sum."""
    with torch.no_grad():
        z = masked(x, **kwargs)
        sizes = torch.where(z.isinf(), 0.0, z.abs())
        if sizes.numel() > 0:
            sizes = sizes + (sizes.amax(dim, keepdim=True) if sizes.dim() > 0 else sizes)
        share = torch.softmax(z, dim).nan_to_num()
        return share, share * (1 + sizes), depth(x.shape[dim] if x.dim() > 0 else 1)


def magnitude(log: bool, x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    """The absolute error of a result from the rounding of exponents and sum."""
    share, terms, roundings = shares(x, dim, **kwargs)
    moved = terms + share * roundings
    return torch.where(share > 0, moved / share, 0.0) if log else moved


def gradient_magnitude(log: bool, x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    """A function whose gradients are the op's, with the absolute values of all terms."""
    _, terms, roundings = shares(x, dim, **kwargs)
    moved = x * abs(kwargs.get("scale", 1.0))
    mixed = (terms * moved).sum(dim, keepdim=True) * roundings
    return moved + mixed if log else terms * (moved + mixed)


def output_sensitivity(log: bool, x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    """The change of each gradient per relative error of the output that it is computed from."""
    share, _, _ = shares(x, dim, **kwargs)
    moved = x * abs(kwargs.get("scale", 1.0))
    if log:
        sizes = -share * torch.where(share > 0, share.log(), 0.0)
        return (sizes * moved).sum(dim, keepdim=True).expand_as(x)
    return share * (moved + 2 * (share * moved).sum(dim, keepdim=True))


def spec(name: str, function: Softmax, log: bool, module: type[nn.Module]) -> OpSpec:
    """The contract of a softmax with torch's ``function``, a scale and masks as its reference."""
    return OpSpec(
        op=getattr(torchkiln, name),
        reference=functools.partial(reference, function),
        magnitude=functools.partial(magnitude, log),
        gradient_magnitude=functools.partial(gradient_magnitude, log),
        output_sensitivity=functools.partial(output_sensitivity, log),
        inputs=functools.partial(inputs, log),
        refusals=Refusals(dims={"dim": "x"}),
        invalid=functools.partial(invalid, name),
        operations=(5, 4),
        opaque=True,
        bench_shapes=((32768, 4096), (8192, 32768), (8192, 131072)),
        small_shapes=((1, 4096), (8, 4096), (64, 4096), (512, 4096)),
        helpers=("_softmax_backward",),
        module=layer(module, -1, scale=0.5, causal=True),
    )


SOFTMAX = spec("softmax", torch.softmax, False, torchkiln.nn.Softmax)
LOG_SOFTMAX = spec("log_softmax", torch.log_softmax, True, torchkiln.nn.LogSoftmax)
