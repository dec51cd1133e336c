"""Random calls for timing: a seed and a number define sizes, layout, dtype and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torchkiln
from torchkiln.bench.case import BACKWARD, FORWARD, BenchCase
from torchkiln.testing import OpSpec, Sample
from torchkiln.testing.data import contiguous_strides, drawn_sizes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MOST_BYTES = 1 << 28
"""Bytes of the largest tensor of a call on a GPU."""
MOST_BYTES_ON_CPU = 1 << 24
MOST_OPERATIONS = 1 << 41
"""Operations of a call on a GPU: a few milliseconds of products in half precision."""
MOST_OPERATIONS_ON_CPU = 1 << 31


@dataclass(frozen=True)
class Draw:
    """A call that can be drawn again."""

    key: str
    case: BenchCase
    direction: str
    layout: str


def narrowed(x: Tensor) -> Tensor:
    """A copy of ``x`` in rows of a wider tensor."""
    wide = x.new_empty((*x.shape[:-1], x.shape[-1] + 8))
    return wide[..., : x.shape[-1]].copy_(x)


def transposed(x: Tensor) -> Tensor:
    """A copy of ``x`` with the last two dimensions exchanged in memory."""
    return x.mT.contiguous().mT


def channels_last(x: Tensor) -> Tensor:
    """A copy of ``x`` with adjacent channels, if ``x`` has four dimensions."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


LAYOUTS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "dense": (0, lambda x: x),
    "rows of a wider tensor": (2, narrowed),
    "transposed": (2, transposed),
    "channels_last": (4, channels_last),
}
"""The fewest dimensions for each layout, and the function that makes it."""


def laid_out(sample: Sample, name: str) -> Sample:
    """The call with its largest tensors at another layout."""
    for i in sample.positions:
        x = sample.args[i]
        if x.dim() >= 2 and x.numel() == sample.numel and x.is_floating_point():
            sample = sample.substitute(i, LAYOUTS[name][1](x))
    return sample


def fitting(
    spec: OpSpec, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], most: int
) -> tuple[int, int]:
    """The shape, with its larger size halved until no tensor has more than ``most`` bytes.

    A weight may have columns**2 elements, and the rows of a tensor another width than ``columns``.
    """
    rows, columns = shape
    with FakeTensorMode():
        while max(rows, columns) > 1 and any(
            tensor.nbytes > most for tensor in spec.bench(device, dtype, (rows, columns)).tensors
        ):
            rows, columns = (rows // 2, columns) if rows > columns else (rows, columns // 2)
    return rows, columns


def sizes_of(
    spec: OpSpec, device: torch.device, dtype: torch.dtype, rng: Random, most: int
) -> tuple[int, int]:
    """Rows and columns; products have fewer columns, which bounds their operations."""
    rows, columns = drawn_sizes(rng, most // dtype.itemsize, 2)
    shape = (rows, min(columns, 1 << 13)) if spec.threads_matter else (rows, columns)
    return fitting(spec, device, dtype, shape, most)


def key(seed: int, number: int) -> str:
    """Names a call in the file of a run."""
    return f"{seed}:{number}"


def drawn(specs: Sequence[OpSpec], device: torch.device, seed: int, number: int) -> Draw | None:
    """The call of a seed and a number; None if it is larger than the limits above."""
    rng = Random(key(seed, number))
    torch.manual_seed(rng.getrandbits(32))
    spec = rng.choice(specs)
    dtype = rng.choice([d for d in DTYPES if d in spec.dtypes] or spec.dtypes)
    on_gpu = device.type == "cuda"
    most = MOST_BYTES if on_gpu else MOST_BYTES_ON_CPU
    if spec.drawn is not None:
        label, sample = "", spec.drawn(device, dtype, rng, most // dtype.itemsize)
    else:
        shape = sizes_of(spec, device, dtype, rng, most)
        variant = rng.choice((0, *range(1 + count(spec, device, dtype))))
        if variant and spec.bench_variants is not None:
            label, sample = next(
                islice(spec.bench_variants(device, dtype, shape), variant - 1, None)
            )
        else:
            label, sample = "", spec.bench(device, dtype, shape)
    rank = max(sample.args[i].dim() for i in sample.positions)
    layout = rng.choice(["dense", *(name for name, (least, _) in LAYOUTS.items() if least <= rank)])
    directions = (FORWARD, BACKWARD) if spec.wanted(sample) else (FORWARD,)
    direction = rng.choice(directions)
    rows = max((sample.args[i] for i in sample.positions), key=Tensor.numel).shape
    case = BenchCase(spec, label, sample, dtype, (rows[:-1].numel(), rows[-1] if rows else 1))
    if case.computed(direction) > (MOST_OPERATIONS if on_gpu else MOST_OPERATIONS_ON_CPU):
        return None
    return Draw(
        key(seed, number), replace(case, sample=laid_out(sample, layout)), direction, layout
    )


def count(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> int:
    """The number of variants of a spec."""
    if spec.bench_variants is None:
        return 0
    return sum(1 for _ in spec.bench_variants(device, dtype, (2, 256)))


def tensor_text(x: Tensor) -> str:
    """An expression that makes a tensor of the same shape, strides and dtype."""
    place = f"dtype={x.dtype}, device={x.device.type!r}"
    shape = tuple(x.shape)
    if x.dtype == torch.bool:
        return f"torch.rand({shape}, device={x.device.type!r}) < 0.5"
    if not x.is_floating_point():
        high = max(1, int(x.max()) + 1) if x.numel() else 1
        return f"torch.randint({high}, {shape}, {place})"
    if list(x.stride()) == contiguous_strides(x.shape):
        return f"torch.randn({shape}, {place})"
    length = 1 + sum((n - 1) * s for n, s in zip(shape, x.stride(), strict=True))
    return f"torch.randn({length}, {place}).as_strided({shape}, {x.stride()})"


def text(draw: Draw) -> str:
    """The call as Python code."""

    def of(value: object) -> str:
        if isinstance(value, torchkiln.QuantizedWeight):  # its numbers do not affect times
            weight = torch.empty(value.data.shape, device=value.data.device)
            return f"torchkiln.quantize_weight({tensor_text(weight)})"
        return tensor_text(value) if isinstance(value, Tensor) else repr(value)

    op = draw.case.spec.op
    args, kwargs = draw.case.sample.arguments(op)
    given = [*map(of, args), *(f"{name}={of(value)}" for name, value in kwargs.items())]
    place = "torchkiln" if hasattr(torchkiln, op.__name__) else "torch.ops.torchkiln"
    return f"{place}.{op.__name__}({', '.join(given)})"
