"""Gradients of both orders, at any strides, and only for the arguments that require them."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchkiln.testing.check import check
from torchkiln.testing.compare import (
    Truths,
    Where,
    gradients,
    noted,
    outputs,
    require,
    require_gradients,
    require_identical,
    require_same,
    vector_jacobian,
)
from torchkiln.testing.contract.values import SMALL, relaid
from torchkiln.testing.data import layouts, normal
from torchkiln.testing.sample import FLOATING, Result, Sample
from torchkiln.testing.spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

FEW = 64
"""The most elements of a sample whose numerical Jacobian is computed element by element."""


def subsets(positions: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All non-empty subsets of the positions."""
    for count in range(1, len(positions) + 1):
        yield from combinations(positions, count)


def incoming(spec: OpSpec, result: Result) -> list[Tensor | None]:
    """A gradient for each output; None for outputs without a gradient."""
    return [
        None
        if i in spec.constant
        else normal(f"grad{i or ''}", output.shape, output.device, output.dtype)
        for i, output in enumerate(outputs(result))
    ]


@check(dtypes=FLOATING, needs="differentiable")
def gradient_values(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Every gradient is as close to float64 as torch's own, for each choice of arguments.

    Recording the graph changes no bit of the output. Each of several outputs may be used alone.
    """
    for sample in spec.samples(device, dtype):
        wanted = spec.wanted(sample)
        unrecorded = sample.call(spec.op)
        grads = incoming(spec, unrecorded)
        recorded = spec.leaves(sample).call(spec.op)
        require_same(recorded, unrecorded, Where(spec, "gradient_values", sample, "recorded"))
        full: dict[int, Tensor] = {}
        for positions in reversed(list(subsets(wanted))):
            where = Where(spec, "gradient_values", sample, f"gradients of {positions}")
            leaves = spec.leaves(sample, positions)
            found = vector_jacobian(spec.op, leaves, positions, grads)
            if positions == wanted:
                require_gradients(found, sample, positions, grads, where)
                full = dict(zip(positions, found, strict=True))
            for position, one in zip(positions, found, strict=True):
                require_identical(one, full[position], where.at(f"argument {position}"))
        several = [i for i, grad in enumerate(grads) if grad is not None]
        for i in several if len(several) > 1 else ():
            where = Where(spec, "gradient_values", sample, f"output {i} alone")
            alone = [grad if i == k else None for k, grad in enumerate(grads)]
            found = vector_jacobian(spec.op, spec.leaves(sample), wanted, alone)
            require_gradients(found, sample, wanted, alone, where)


@check(dtypes=(torch.float32, torch.bfloat16), needs="differentiable")
def gradients_that_are_recorded(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Gradients with create_graph=True are as close to float64 as those without."""
    for sample in spec.samples(device, dtype):
        if not 0 < sample.numel <= SMALL:
            continue
        wanted = spec.wanted(sample)
        leaves = spec.leaves(sample)
        results = outputs(leaves.call(spec.op))
        grads = incoming(spec, results)
        found = gradients(results, leaves.take(wanted), grads, create_graph=True)
        where = Where(spec, "gradients_that_are_recorded", sample)
        plain = [gradient.detach() for gradient in found]
        require_gradients(plain, sample, wanted, grads, where)


@check(dtypes=FLOATING, needs="differentiable")
def gradient_strides(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Inputs and incoming gradients may have any strides; no byte in or around them changes."""
    for sample in spec.samples(device, dtype):
        if not 0 < sample.numel <= SMALL:
            continue
        wanted = spec.wanted(sample)
        grads = incoming(spec, sample.call(spec.op))
        truths = Truths()
        for i, grad in enumerate(grads):
            for placed in layouts(grad) if grad is not None else ():
                name = f"incoming gradient {f'{i} ' if i else ''}{placed.name}"
                where = Where(spec, "gradient_strides", sample, name)
                before = placed.bits()
                laid = [*grads[:i], placed.tensor, *grads[i + 1 :]]
                found = vector_jacobian(spec.op, spec.leaves(sample), wanted, laid)
                unchanged = torch.equal(placed.bits(), before)
                require(unchanged, where, "the backward wrote to its input")
                require_gradients(found, sample, wanted, laid, where, truths)
        for moved, buffers in relaid(sample):
            bytes_before = [placed.bits() for placed in buffers]
            where = Where(spec, "gradient_strides", moved)
            found = vector_jacobian(spec.op, spec.leaves(moved), wanted, grads)
            for placed, old in zip(buffers, bytes_before, strict=True):
                unchanged = torch.equal(placed.bits(), old)
                require(unchanged, where, "the backward wrote to an argument or around it")
            require_gradients(found, moved, wanted, grads, where, truths)


@check(needs="differentiable")
def only_the_gradients_asked_for(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """No graph without a leaf, none under no_grad, and no gradient for other arguments."""
    sample = spec.typical(device, dtype)
    where = Where(spec, "only_the_gradients_asked_for", sample)
    for output in outputs(sample.call(spec.op)):
        require(not output.requires_grad, where, "a graph without a leaf")
    with torch.no_grad():
        results = outputs(spec.leaves(sample).call(spec.op))
    for output in results:
        require(not output.requires_grad, where, "a graph under no_grad")
    for positions in subsets(spec.wanted(sample)):
        leaves = spec.leaves(sample, positions)
        results = outputs(leaves.call(spec.op))
        used = [output for i, output in enumerate(results) if i not in spec.constant]
        for output in used:
            require(output.requires_grad, where, f"no graph for arguments {positions}")
        torch.autograd.backward([output.sum() for output in used])
        got = tuple(i for i in sample.positions if leaves.args[i].grad is not None)
        require(got == positions, where, f"gradients of {got}, expected those of {positions}")


def small(spec: OpSpec, device: torch.device) -> Iterator[Sample]:
    """Float64 samples that are small enough for a numerical Jacobian."""
    for sample in spec.samples(device, torch.float64, requires_grad=True):
        if 0 < sample.numel <= FEW and all(
            sample.args[i].dtype == torch.float64 for i in spec.wanted(sample)
        ):
            yield sample


@check(dtypes=(torch.float64,), needs="differentiable")
def gradcheck(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Backward, forward mode and batched gradients agree with numerical differences."""
    for sample in small(spec, device):
        wanted = spec.wanted(sample)
        with noted(Where(spec, "gradcheck", sample)):
            torch.autograd.gradcheck(
                sample.bind(spec.op, wanted),
                sample.take(wanted),
                fast_mode=False,
                check_undefined_grad=True,
                check_batched_grad=True,
                check_forward_ad=True,
            )


@check(dtypes=(torch.float64,), needs="differentiable")
def gradgradcheck(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """The backward of the backward agrees with numerical differences."""
    for sample in small(spec, device):
        wanted = spec.wanted(sample)
        with noted(Where(spec, "gradgradcheck", sample)):
            torch.autograd.gradgradcheck(
                sample.bind(spec.op, wanted),
                sample.take(wanted),
                fast_mode=False,
                gen_non_contig_grad_outputs=True,
            )
