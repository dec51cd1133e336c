"""The axes that each dimension of a tensor runs over, in a recorded call of a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchkiln.patch.formula.terms import Expression, NoFormulaError

Dim = tuple[str, ...]
"""The labels of the axes that a dimension runs over, outer ones first; () for a size of 1."""

ANY = "*"
"""The label of a dimension along which an expanded tensor is constant."""


@dataclass(frozen=True)
class Value:
    """The expression and the dimensions of a recorded tensor."""

    expression: Expression
    dims: tuple[Dim, ...]


class Axes:
    """The sizes of the axes of a call."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def add(self, label: str, size: int) -> Dim:
        """Add an axis; returns a dimension that runs over it."""
        self.sizes[label] = size
        return (label,)

    def size(self, dim: Dim) -> int:
        """The size of a dimension."""
        return math.prod(self.sizes[label] for label in dim)

    def parts(self, label: str, groups: int) -> Dim:
        """The two parts of an axis that is split into groups."""
        size = self.sizes[label]
        if "/" in label or label.startswith(ANY):
            raise NoFormulaError("it splits a dimension more than once")
        outer, inner = f"{label}/{groups}.0", f"{label}/{groups}.1"
        self.sizes |= {outer: groups, inner: size // groups}
        return outer, inner

    def expanded(self, size: int) -> Dim:
        """A dimension along which a tensor is constant."""
        return self.add(f"{ANY}{size}", size)

    def viewed(self, dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
        """The dimensions of a view: neighbours merged, or one split into groups."""
        rest = [label for dim in dims for label in dim if self.sizes[label] != 1]
        found: list[Dim] = []
        for size in shape:
            taken: list[str] = []
            left = size
            while left > 1 and rest:
                label = rest.pop(0)
                have = self.sizes[label]
                if left % have == 0:
                    taken.append(label)
                    left //= have
                elif have % left == 0:
                    outer, inner = self.parts(label, left)
                    taken.append(outer)
                    rest.insert(0, inner)
                    left = 1
                else:
                    raise NoFormulaError("it changes the shape")
            if left != 1:
                raise NoFormulaError("it changes the shape")
            found.append(merged(tuple(taken)))
        if rest:
            raise NoFormulaError("it changes the shape")
        return tuple(found)

    def broadcast(self, one: Sequence[Dim], other: Sequence[Dim]) -> tuple[Dim, ...]:
        """The dimensions of an elementwise result."""
        rank = max(len(one), len(other))
        pairs = zip(padded(one, rank), padded(other, rank), strict=True)
        return tuple(self.joined(a, b) for a, b in pairs)

    def joined(self, a: Dim, b: Dim) -> Dim:
        """The common dimension of two tensors."""
        if a == b or not b:
            return a
        if not a:
            return b
        if self.size(a) == self.size(b):
            for wide, other in ((a, b), (b, a)):
                if all(label.startswith(ANY) for label in other):
                    return wide
                if len(wide) == 1 and is_constant_part(wide[0], other):
                    return wide
        raise NoFormulaError("it combines different dimensions")


def is_constant_part(label: str, dim: Dim) -> bool:
    """Whether a dimension has a value for each group of an axis, repeated along the group."""
    return len(dim) == 2 and dim[1].startswith(ANY) and dim[0].startswith(f"{label}/")


def padded(dims: Sequence[Dim], rank: int) -> tuple[Dim, ...]:
    """The dimensions with leading sizes of 1."""
    return (*[()] * (rank - len(dims)), *dims)


def merged(dim: Dim) -> Dim:
    """The dimension, with the two parts of a split axis joined again."""
    found: list[str] = []
    for label in dim:
        base, _, part = label.rpartition(".")
        if part == "1" and found and found[-1] == f"{base}.0":
            found[-1] = base.rpartition("/")[0]
        else:
            found.append(label)
    return tuple(found)
