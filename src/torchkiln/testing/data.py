"""Sample data: the same values on every device and in every run, at any strides."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

USUAL = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 100, 128, 192, 197, 256, 320, 384, 512, 577)
"""Usual sizes in models; larger ones are multiples of 64 or 256."""

SENTINEL = 77
"""The value around the tensors of :func:`layouts` when their dtype has no NaN."""


def normal(
    key: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normal deviates that depend on ``key`` and ``shape`` only, rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key}{tuple(shape)}".encode()))
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return values.to(dtype).to(device)


def drawn_size(rng: Random, most: int) -> int:
    """A size up to ``most`` with a uniform logarithm; half of the sizes are usual in models."""
    value = max(1, int(2 ** rng.uniform(0, math.log2(max(most, 1)))))
    if rng.random() < 0.5:
        return value
    step = 256 if value >= 1024 else 64
    usual = [n for n in USUAL if n <= value] if value <= USUAL[-1] else [value // step * step]
    return min(usual[-1], most)


def drawn_sizes(rng: Random, most: int, count: int) -> tuple[int, ...]:
    """Sizes in random order whose product is at most ``most``."""
    total, found = drawn_size(rng, most), []
    for _ in range(count - 1):
        found.append(drawn_size(rng, total))
        total //= found[-1]
    found.append(max(1, total))
    rng.shuffle(found)
    return tuple(found)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """The tensor times a factor; integer and boolean tensors are returned unchanged."""
    return tensor * factor if tensor.is_floating_point() else tensor


LARGE = (2**16 + 1, 2**15 + 1)
"""Rows and columns of :func:`large_matrix`."""


def cycle(count: int, length: int, device: torch.device) -> Tensor:
    """A bfloat16 vector of ``count`` elements that repeats 0, 1 / length, 2 / length, ..."""
    return torch.arange(count, device=device).remainder(length).to(torch.bfloat16) / length


def large_matrix(device: torch.device) -> Tensor:
    """A bfloat16 matrix of more than 2**31 elements from -16 to 25.

    No row or column is a scaled or shifted copy of another, so a wrong address changes the result.
    """
    rows, columns = LARGE
    factors = 10 * cycle(rows, 251, device) - 4
    return torch.outer(factors, 4 * cycle(columns, 241, device)).add_(cycle(columns, 199, device))


@dataclass(frozen=True)
class Placed:
    """A tensor inside a larger buffer whose other elements are sentinels."""

    name: str
    tensor: Tensor
    buffer: Tensor

    def bits(self) -> Tensor:
        """A copy of the bytes of the whole buffer: inputs and sentinels."""
        return self.buffer.view(torch.uint8).clone()


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """The row-major strides of a shape."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return strides


def place(name: str, values: Tensor, strides: Sequence[int], offset: int) -> Placed:
    """Put ``values`` at ``strides`` and ``offset`` into a buffer of sentinels."""
    reach = sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True) if n > 1)
    fill = math.nan if values.is_floating_point() or values.is_complex() else SENTINEL
    margin = 8
    size = offset + reach + 1 + margin
    buffer = torch.full((size,), fill, dtype=values.dtype, device=values.device)
    view = buffer.as_strided(values.shape, strides, offset)
    # A stride of 0 maps many elements to one address, which gets the value of the first.
    first = tuple(slice(1) if s == 0 else slice(None) for s in strides)
    view[first].copy_(values[first])
    return Placed(name, view, buffer)


def layouts(values: Tensor) -> Iterator[Placed]:
    """``values`` at each kind of strides that kernels may treat differently."""
    shape = tuple(values.shape)
    rank = len(shape)
    dense = contiguous_strides(shape)
    aligned = 16
    yield place("contiguous", values, dense, aligned)
    yield place("offset by one element", values, dense, aligned + 1)
    if rank == 0:
        return
    yield place("every second column", values, [2 * s for s in dense], aligned)
    yield place("expanded along the first dimension", values, [0, *dense[1:]], aligned)
    yield place("expanded in all dimensions", values, [0] * rank, aligned + 3)
    if rank >= 2:
        wide = contiguous_strides((*shape[:-1], shape[-1] + 3))
        yield place("rows of a wider matrix", values, wide, aligned + 2)
        reverse = contiguous_strides(shape[::-1])[::-1]
        yield place("transposed", values, reverse, aligned)
        yield place("transposed, offset", values, reverse, aligned + 1)
        yield place("expanded along the last dimension", values, [*dense[:-1], 0], aligned)
    if rank == 4:
        _, c, h, w = shape
        last = [h * w * c, 1, w * c, c]
        yield place("channels last", values, last, aligned)
