"""The layout of an elementwise call's operands, packed as ``Space`` of jit_elementwise.cuh."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MAX_RANK = 8
VECTOR_BYTES = 16
BLOCK_VECTORS = 256 * 2  # 256 threads per block, 2 vectors per thread


@dataclass(frozen=True)
class Layout:
    """The compile-time and launch parameters of a kernel for some operands."""

    lanes: int
    """Elements per vector."""
    reaches: tuple[str, ...]
    """How a thread reads the elements of each operand: see :func:`reach`."""
    blocks: int
    space: bytes


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The common shape of broadcast tensors; raises a RuntimeError if there is none.

    Only symbolic shapes use ``torch.broadcast_shapes``, whose first call imports sympy: 0.5 s.
    """
    first = tuple(shapes[0])
    if not all(type(n) is int for shape in shapes for n in shape):
        return tuple(torch.broadcast_shapes(*shapes))
    if all(tuple(shape) == first for shape in shapes):
        return first
    common = [1] * max(map(len, shapes))
    for shape in shapes:
        for i in range(-len(shape), 0):
            if shape[i] != 1:
                if common[i] not in (1, shape[i]):
                    raise RuntimeError(f"got {common[i]} and {shape[i]} in dimension {i}")
                common[i] = shape[i]
    return tuple(common)


def merge_dimensions(
    shape: Sequence[int], strides: list[list[int]]
) -> tuple[list[int], list[list[int]]]:
    """Sizes and strides with the innermost dimension first and as few dimensions as possible.

    Dimensions of size 1 are removed. Neighbours merge if in every operand the outer stride is the
    inner stride times the inner size.
    """
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            continue
        merges = bool(sizes) and all(
            s[d] == k[-1] * sizes[-1] for s, k in zip(strides, kept, strict=True)
        )
        if merges:
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for s, k in zip(strides, kept, strict=True):
            k.append(s[d])
    return sizes, kept


def divisor(size: int) -> tuple[int, int]:
    """Multiplier and shift with which fast_divide.cuh divides by ``size``."""
    if size < 2:
        return 0, 0
    log2 = (size - 1).bit_length()
    return (1 << (31 + log2)) // size + 1, log2 - 1


def layout(shape: Sequence[int], operands: Sequence[Tensor]) -> Layout | None:
    """The layout of operands expanded to ``shape``; None if merging leaves more than MAX_RANK.

    Args:
        shape: the shape of the result.
        operands: the tensors, a dense output first: its dtype sets the elements per vector.
    """
    sizes, strides = merge_dimensions(shape, [list(t.stride()) for t in operands])
    if not sizes:
        sizes, strides = [1], [[0] for _ in operands]
    if len(sizes) > MAX_RANK:
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
    pad = [0] * (MAX_RANK - rank)
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
        f"<qqii{3 * MAX_RANK}I{MAX_RANK}q{len(steps)}q{len(operands)}Q",
        *(count, elements, rank, narrow),
        *words,
        *(*sizes, *pad),
        *steps,
        *(t.data_ptr() for t in operands),
    )
    return Layout(lanes, tuple(reaches), -(-count // BLOCK_VECTORS), space)


def reach(tensor: Tensor, strides: Sequence[int], sizes: Sequence[int], lanes: int) -> str:
    """How a thread reads ``lanes`` elements of a tensor along the innermost dimension.

    ``one``: one element for all lanes. ``vector``: one aligned access. ``any``: element by element.
    """
    if strides[0] == 0 or sizes[0] == 1 == len(sizes):
        return "one"
    bytes_ = min(VECTOR_BYTES, lanes * tensor.itemsize)
    even = strides[0] == 1 and not any(stride % lanes for stride in strides[1:])
    return "vector" if even and tensor.data_ptr() % bytes_ == 0 else "any"
