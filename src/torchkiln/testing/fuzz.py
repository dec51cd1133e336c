"""Random calls: shapes, strides, dtypes and values that hypothesis draws.

::

    @given(plans(MY_SPEC))
    def test_any_call(plan):
        check_call(MY_SPEC, plan, torch.device("cpu"))
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st
from torch import Tensor

from torchkiln.testing.compare import (
    Where,
    exact,
    gradients,
    outputs,
    require,
    require_gradients,
    require_same,
    require_values,
)
from torchkiln.testing.contract.gradients import incoming
from torchkiln.testing.contract.values import SMALL
from torchkiln.testing.data import Placed, contiguous_strides, place
from torchkiln.testing.sample import Sample
from torchkiln.testing.spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

# Sizes around the widths of vectors, warps and blocks of rows.
EDGES = tuple(n + k for n in (16, 32, 64, 128, 256, 512, 1024, 2048) for k in (-1, 0, 1))
MOST = 1 << 15
"""Maximum number of elements of a drawn matrix."""


@dataclass(frozen=True)
class Layout:
    """Strides and offset for a tensor of any rank."""

    order: int
    """A rotation of the dimensions, slowest to fastest; negative numbers also reverse the order."""
    gaps: tuple[int, int]
    """Unused elements after each element of the fastest dimension, and after each other one."""
    offset: int
    """Elements before the first one in memory."""
    expanded: int | None
    """The dimension of stride 0, if any."""

    def place(self, values: Tensor) -> Placed:
        """The values at these strides, among sentinels."""
        rank = values.dim()
        order = list(range(rank))
        if rank:
            turn = self.order % rank
            order = order[turn:] + order[:turn]
        if self.order < 0:
            order.reverse()
        # Contiguous strides of the sizes plus gaps, with the dimensions in the drawn order.
        wide = [values.shape[d] + self.gaps[1] * (i > 0) for i, d in enumerate(order)]
        strides = [0] * rank
        for d, stride in zip(order, contiguous_strides(wide), strict=True):
            strides[d] = stride * (1 + self.gaps[0])
        if rank and self.expanded is not None:
            strides[self.expanded % rank] = 0
        return place(str(self), values, strides, 16 + self.offset)


@functools.lru_cache(maxsize=8)
def small_samples(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> dict[str, Sample]:
    """The small samples of a spec."""
    return {s.name: s for s in spec.samples(device, dtype) if s.numel <= SMALL}


@dataclass(frozen=True)
class Plan:
    """The drawn numbers that define a call; hypothesis prints them when a test fails."""

    dtype: torch.dtype
    source: str | tuple[int, int]
    """The name of a sample, or the rows and columns of a call."""
    exponent: int
    """The power of two that scales the values."""
    seed: int
    layouts: tuple[Layout, ...]
    """Layouts of arguments, then of incoming gradients, used in turn; empty if all are dense."""

    def sample(self, spec: OpSpec, device: torch.device) -> Sample:
        """The call with dense tensors."""
        torch.manual_seed(self.seed)
        if isinstance(self.source, str):
            sample = small_samples(spec, device, self.dtype)[self.source]
        else:
            sample = replace(spec.bench(device, self.dtype, self.source), seed=self.seed)
        scaled = sample
        for i in spec.wanted(sample):
            scaled = scaled.substitute(i, sample.args[i] * 2.0**self.exponent)
        return replace(scaled, name=str(self))

    def place(self, tensors: Sequence[Tensor], turn: int) -> list[Placed]:
        """Each tensor at a drawn layout, beginning with layout ``turn``."""
        if not self.layouts:
            return [place("dense", t, contiguous_strides(t.shape), 16) for t in tensors]
        count = len(self.layouts)
        return [self.layouts[(turn + i) % count].place(t) for i, t in enumerate(tensors)]


def sizes() -> st.SearchStrategy[int]:
    """Small sizes, and sizes around powers of two."""
    return st.integers(1, 40) | st.sampled_from(EDGES)


def plans(spec: OpSpec) -> st.SearchStrategy[Plan]:
    """Plans of calls of an op."""
    cpu = torch.device("cpu")
    names = list(small_samples(spec, cpu, spec.dtypes[0]))
    matrices = st.tuples(sizes(), sizes()).filter(lambda shape: shape[0] * shape[1] <= MOST)
    layout = st.builds(
        Layout,
        order=st.integers(-3, 3),
        gaps=st.tuples(st.integers(0, 2), st.integers(0, 5)),
        offset=st.integers(0, 17),
        expanded=st.none() | st.integers(0, 3),
    )
    return st.builds(
        Plan,
        dtype=st.sampled_from(spec.dtypes),
        source=st.sampled_from(names) | matrices,
        exponent=st.integers(-10, 4),
        seed=st.integers(0, 2**31),
        layouts=st.lists(layout, max_size=4).map(tuple),
    )


def overflows(spec: OpSpec, sample: Sample) -> bool:
    """Whether torch's result of a call is not finite where the float64 result is finite."""
    with torch.no_grad():
        truth = outputs(exact(spec, sample).call(spec.reference))
        beside = outputs(sample.call(spec.composite))
    pairs = zip(truth, beside, strict=True)
    return any(bool((one.isfinite() & ~other.isfinite()).any()) for one, other in pairs)


def check_call(spec: OpSpec, plan: Plan, device: torch.device) -> None:
    """Check values and gradients of one call, and that it leaves its arguments unchanged.

    A call whose values are too large for the dtype is not checked: overflow depends on the order of
    a sum.
    """
    dense = plan.sample(spec, device)
    if overflows(spec, dense):
        return
    placed = plan.place(dense.take(dense.positions), 0)
    sample = dense
    for position, one in zip(dense.positions, placed, strict=True):
        sample = sample.substitute(position, one.tensor)
    where = Where(spec, "fuzz", sample)
    unrecorded = sample.call(spec.op)
    require_values(unrecorded, sample, where)
    leaves = spec.leaves(sample)
    wanted = spec.wanted(sample)
    results = outputs(leaves.call(spec.op))
    require_same(results, unrecorded, where.at("recorded"))
    laid = plan.place([g for g in incoming(spec, results) if g is not None], len(placed))
    before = [one.bits() for one in (*placed, *laid)]
    grads = [one.tensor for one in laid]
    found = gradients(results, leaves.take(wanted), grads)
    for one, old in zip((*placed, *laid), before, strict=True):
        require(torch.equal(one.bits(), old), where, f"the op wrote to its input at {one.name}")
    require_gradients(found, sample, wanted, grads, where)
