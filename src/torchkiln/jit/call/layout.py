"""Where the operands of an elementwise kernel lie, packed as jit_elementwise.cuh's Space."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MOST_RANK = 8
VECTOR_BYTES = 16
BLOCK_VECTORS = 256 * 2  # threads, and vectors of each


@dataclass(frozen=True)
class Layout:
    """How a kernel is compiled and launched for some operands."""

    lanes: int
    reaches: tuple[str, ...]
    """Of each operand: vector, one or any."""
    blocks: int
    space: bytes


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that shapes broadcast to; a RuntimeError where they do not.

    torch.broadcast_shapes imports sympy when it is first called, half a second of it.
    """
    first = tuple(shapes[0])
    if not all(type(n) is int for shape in shapes for n in shape):
        return tuple(torch.broadcast_shapes(*shapes))  # while torch traces with symbols
    if all(tuple(shape) == first for shape in shapes):
        return first
    found = [1] * max(map(len, shapes))
    for shape in shapes:
        for i in range(-len(shape), 0):
            if shape[i] != 1:
                if found[i] not in (1, shape[i]):
                    raise RuntimeError(f"got {found[i]} and {shape[i]} in dimension {i}")
                found[i] = shape[i]
    return tuple(found)


def merged(shape: Sequence[int], strides: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Dimensions from the innermost on, without those of size 1; what runs evenly becomes one."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            continue
        even = bool(sizes) and all(
            s[d] == k[-1] * sizes[-1] for s, k in zip(strides, kept, strict=True)
        )
        if even:
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for s, k in zip(strides, kept, strict=True):
            k.append(s[d])
    return sizes, kept


def divisor(size: int) -> tuple[int, int]:
    """Multiplier and shift of divide.cuh's division by ``size``."""
    if size < 2:
        return 0, 0
    log2 = (size - 1).bit_length()
    return (1 << (31 + log2)) // size + 1, log2 - 1


def layout(shape: Sequence[int], operands: Sequence[Tensor]) -> Layout | None:
    """The layout of operands that are expanded to ``shape``, the first of which is dense.

    None where more dimensions are left than a kernel knows.
    """
    sizes, strides = merged(shape, [list(t.stride()) for t in operands])
    if not sizes:
        sizes, strides = [1], [[0] for _ in operands]
    if len(sizes) > MOST_RANK:
        return None
    lanes = VECTOR_BYTES // operands[0].itemsize
    reaches = [reach(t, s, sizes, lanes) for t, s in zip(operands, strides, strict=True)]
    if "any" in reaches or (len(sizes) > 1 and sizes[0] % lanes):
        lanes, reaches = 1, ["any"] * len(operands)
    elements = sizes[0]
    sizes[0] = -(-elements // lanes)
    count = 1
    for size in sizes:
        count *= size
    rank = len(sizes)
    pad = [0] * (MOST_RANK - rank)
    divisors = [divisor(size) if size < 2**31 else (0, 0) for size in sizes]
    narrow = count < 2**31
    words = [
        *(size if narrow else 0 for size in sizes),
        *pad,
        *(multiplier if narrow else 0 for multiplier, _ in divisors),
        *pad,
        *(shift for _, shift in divisors),
        *pad,
    ]
    steps = [
        step
        for how, s in zip(reaches, strides, strict=True)
        for step in (s[0] * lanes if how == "vector" else s[0], *s[1:], *pad)
    ]
    space = struct.pack(
        f"<qqii{3 * MOST_RANK}I{MOST_RANK}q{len(steps)}q{len(operands)}Q",
        *(count, elements, rank, narrow),
        *words,
        *(*sizes, *pad),
        *steps,
        *(t.data_ptr() for t in operands),
    )
    return Layout(lanes, tuple(reaches), -(-count // BLOCK_VECTORS), space)


def reach(tensor: Tensor, strides: Sequence[int], sizes: Sequence[int], lanes: int) -> str:
    """How a kernel may read a tensor along its innermost dimension."""
    if strides[0] == 0 or sizes[0] == 1 == len(sizes):
        return "one"
    bytes_ = min(VECTOR_BYTES, lanes * tensor.itemsize)
    even = strides[0] == 1 and not any(stride % lanes for stride in strides[1:])
    return "vector" if even and tensor.data_ptr() % bytes_ == 0 else "any"
