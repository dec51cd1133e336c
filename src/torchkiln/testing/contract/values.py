"""Values compared with float64, at every shape and at any strides."""

from __future__ import annotations

import math
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchkiln.testing.check import UnavailableError, check
from torchkiln.testing.compare import (
    Truths,
    Where,
    exact,
    outputs,
    require,
    require_same,
    require_values,
)
from torchkiln.testing.data import Placed, layouts
from torchkiln.testing.sample import FLOATING, Result, Sample
from torchkiln.testing.spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

TINY = 128
"""The most elements of a sample that is traced, or checked by torch's own tools."""
SMALL = 4096
"""The most elements of a sample that is tried in every combination of layouts."""


@check(dtypes=FLOATING)
def values(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Every sample is as close to float64 as torch's composite, by function and by torch.ops."""
    for sample in spec.samples(device, dtype):
        where = Where(spec, "values", sample)
        found = sample.call(spec.op)
        require_values(found, sample, where)
        if spec.through_ops is not None:
            by_ops = without_missing(sample.call(spec.through_ops), found)
            require_same(by_ops, found, where.at("through torch.ops"))


def without_missing(by_ops: Result, found: Result) -> Result:
    """The results of ``torch.ops``, without the empty tensors where the function has None."""
    if isinstance(by_ops, Tensor) or isinstance(found, Tensor):
        return by_ops
    given = [y is not None for y in found]
    return (*compress(by_ops, given), *by_ops[len(given) :])


MANY = 1000
"""Least number of rounding errors in a mean, which is then about 0.01 steps."""
BIAS = 0.1
FEW = 3


@check(dtypes=(torch.float16, torch.bfloat16))
def rounded_to_nearest(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Results of half precision are rounded to the nearest number: their mean error is near zero.

    A single result may be off by one step, because intermediate results are rounded, too.
    """
    info = torch.finfo(dtype)
    judged = 0
    for sample in spec.samples(device, dtype):
        if judged == FEW:
            break
        results = outputs(sample.call(spec.op))
        if max(found.numel() for found in results) < MANY:
            continue
        truths = outputs(exact(spec, sample).call(spec.reference))
        seen = False
        for found, truth in zip(results, truths, strict=True):
            size = truth.abs()
            usual = (size > info.smallest_normal) & (size < info.max) & (found.dtype == dtype)
            if int(usual.sum()) < MANY:
                continue
            step = info.eps * torch.exp2(torch.floor(torch.log2(size[usual])))
            error = (found.double().abs()[usual] - size[usual]) / step
            bias = float(error.clamp(-1, 1).mean())  # if terms cancel, the error is many steps
            where = Where(spec, "rounded_to_nearest", sample)
            require(abs(bias) <= BIAS, where, f"mean error {bias:.2g} steps, allowed {BIAS}")
            seen = True
        judged += seen
    if judged == 0:
        raise UnavailableError(f"needs a sample with {MANY} outputs")


NOT_FINITE = (math.nan, math.inf, -math.inf)
LONG = 2**16
"""The most elements of a sample that gets not-finite values in many rows."""


def with_special_rows(values: Tensor, first: int) -> Tensor:
    """A copy with a not-finite value in every second row of the last dimension.

    Successive rows have NaN and both infinities, each at the first, second, middle and last column,
    to reach vectors and the tails of rows. Counting begins at ``first``.
    """
    filled = values.clone(memory_format=torch.contiguous_format)
    rows = filled.view(-1, filled.shape[-1] if filled.dim() else 1)
    columns = rows.shape[1]
    places = (0, min(1, columns - 1), columns // 2, columns - 1)
    for turn, row in enumerate(range(0, len(rows), 2), start=first):
        rows[row, places[turn // 3 % 4]] = NOT_FINITE[turn % 3]
    return filled


@check(dtypes=FLOATING)
def not_finite(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """NaN and infinities in each argument give the results of the formula.

    The typical sample has one such value at a time. Then rows of all lengths have them, beside rows
    that are finite.
    """
    sample = spec.typical(device, dtype)
    for position in spec.wanted(sample):
        for value in NOT_FINITE:
            tensor = sample.args[position].clone()
            tensor.view(-1)[3 % tensor.numel()] = value
            moved = sample.substitute(position, tensor, f", {value} in argument {position}")
            require_values(moved.call(spec.op), moved, Where(spec, "not_finite", moved))
    positions = spec.wanted(sample)
    for turn, sample in enumerate(spec.samples(device, dtype)):
        for position in set(positions) & set(spec.wanted(sample)):
            # Not for parameters: an infinite weight times a difference that is 0 up to rounding has
            # no defined sign.
            if not 0 < sample.args[position].numel() == sample.numel <= LONG:
                continue
            tensor = with_special_rows(sample.args[position], 5 * turn)
            moved = sample.substitute(position, tensor, f", special rows in argument {position}")
            require_values(moved.call(spec.op), moved, Where(spec, "not_finite", moved))


def relaid(sample: Sample) -> Iterator[tuple[Sample, list[Placed]]]:
    """The sample with one tensor at a time, then with all tensors, at each kind of strides.

    In float64 and float16 only with all tensors, because the other two dtypes run the same code.
    """
    choices = {i: list(layouts(sample.args[i])) for i in sample.positions}
    alone = {sample.args[i].dtype for i in sample.positions} - {torch.float64, torch.float16}
    for i, placed in choices.items() if alone else ():
        for one in placed:
            yield sample.substitute(i, one.tensor, f", argument {i} {one.name}"), [one]
    for row in range(max(map(len, choices.values()))):
        moved, used = sample, []
        for i, placed in choices.items():
            one = placed[row % len(placed)]
            moved = moved.substitute(i, one.tensor, f", argument {i} {one.name}")
            used.append(one)
        yield moved, used


@check(dtypes=FLOATING)
def strides(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Any strides and storage offset give the values; no byte of inputs or around them changes."""
    for sample in spec.samples(device, dtype):
        if sample.numel > SMALL:
            continue
        truths = Truths()
        for moved, buffers in relaid(sample):
            before = [placed.bits() for placed in buffers]
            where = Where(spec, "strides", moved)
            found = moved.call(spec.op)
            for placed, old in zip(buffers, before, strict=True):
                require(torch.equal(placed.bits(), old), where, "the op wrote to its input")
            require_values(found, moved, where, truths)


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory of earlier checks
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    table = dict(line.split(":") for line in lines)
    return int(table["MemAvailable"].split()[0]) * 1024


@check(dtypes=(torch.bfloat16,), large=True, needs="large")
def more_than_2_to_the_31_elements(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Rows on both sides of element 2**31 of a large output equal those of a small call."""
    needed = 18 * 2**30
    if available_memory(device) < needed:
        raise UnavailableError(f"needs {needed >> 30} GiB of free memory on {device}")
    if spec.large is None:
        raise TypeError(f"{spec.name}: got a spec without a large sample")
    sample = spec.large(device)
    found = outputs(sample.call(spec.op))
    count, numel = found[0].shape[0], found[0].numel()
    middle = 2**31 // (numel // count)
    where = Where(spec, "more_than_2_to_the_31_elements", sample)
    require(numel > 2**31, where, f"the output has only {numel} elements")
    for start in (0, middle - 2, count - 3):

        def rows(tensor: Tensor, start: int = start) -> Tensor:
            whole = tensor.dim() > 0 and tensor.shape[0] == count
            return tensor[start : start + 3] if whole else tensor

        part = sample.map(rows)
        require_values(tuple(map(rows, found)), part, where.at(f"rows from {start}"))
