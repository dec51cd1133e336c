"""torch.func and forward-mode differentiation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchkiln.testing.check import check
from torchkiln.testing.compare import (
    Grads,
    Where,
    each,
    exact,
    gradients,
    half_step,
    outputs,
    require,
    require_close,
    require_gradients,
    require_values,
)
from torchkiln.testing.contract.gradients import incoming
from torchkiln.testing.data import normal, scaled
from torchkiln.testing.sample import FLOATING, Result, Sample
from torchkiln.testing.spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Callable


@check(dtypes=FLOATING)
def vmap(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Mapping over each argument, and over all, gives the results of a loop."""
    sample = spec.typical(device, dtype)
    positions = sample.positions
    for mapped in (*((i,) for i in positions), positions):
        stacks = [
            torch.stack([scaled(a, factor) for factor in (1.0, -2.0, 0.5)], dim=-1)
            for a in sample.take(mapped)
        ]
        found = torch.func.vmap(sample.bind(spec.op, mapped), in_dims=-1)(*stacks)
        for k in range(3):
            one = sample
            for i, stack in zip(mapped, stacks, strict=True):
                one = one.substitute(i, stack.select(-1, k))
            where = Where(spec, "vmap", one, f"arguments {mapped}, element {k}")
            require_values(tuple(output[k] for output in outputs(found)), one, where)


def gradients_of_loss(
    spec: OpSpec, sample: Sample, grads: Grads
) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients of a loss by torch.func, as a function of the differentiable arguments."""
    wanted = spec.wanted(sample)
    op = sample.bind(spec.op, wanted)

    def loss(*args: Tensor) -> Tensor:
        pairs = zip(outputs(op(*args)), grads, strict=True)
        used = [(output * grad).sum().double() for output, grad in pairs if grad is not None]
        return torch.stack(used).sum()

    return torch.func.grad(loss, tuple(range(len(wanted))))


@check(dtypes=FLOATING, needs="differentiable")
def func_grad(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """torch.func.grad gives the gradients of backward."""
    sample = spec.typical(device, dtype)
    wanted = spec.wanted(sample)
    grads = incoming(spec, sample.call(spec.op))
    found = gradients_of_loss(spec, sample, grads)(*sample.take(wanted))
    require_gradients(found, sample, wanted, grads, Where(spec, "func_grad", sample))


@check(dtypes=FLOATING, needs="differentiable")
def vmap_of_grad(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """torch.func.grad under vmap gives the gradients of each call."""
    sample = spec.typical(device, dtype)
    wanted = spec.wanted(sample)
    grads = incoming(spec, sample.call(spec.op))
    stacks = [torch.stack([a, -a]) for a in sample.take(wanted)]
    found = torch.func.vmap(gradients_of_loss(spec, sample, grads))(*stacks)
    for k, sign in enumerate((1, -1)):
        one = sample
        for i, stack in zip(wanted, stacks, strict=True):
            one = one.substitute(i, stack[k])
        where = Where(spec, "vmap_of_grad", one, f"arguments times {sign}")
        require_gradients([f[k] for f in found], one, wanted, grads, where)


def tangents(spec: OpSpec, sample: Sample) -> tuple[Tensor, ...]:
    """A direction for each differentiable argument."""
    return tuple(
        normal(f"tangent{i}", sample.args[i].shape, sample.args[i].device, sample.args[i].dtype)
        for i in spec.wanted(sample)
    )


def moving(spec: OpSpec, result: Result) -> tuple[Tensor, ...]:
    """The outputs that have a gradient."""
    return tuple(y for i, y in enumerate(outputs(result)) if i not in spec.constant)


def require_tangents(found: Result, sample: Sample, where: Where) -> None:
    """Compare Jacobian-vector products with the double backward of the float64 reference."""
    spec = where.spec
    directions = tangents(spec, sample)

    def product(function: object, call: Sample, along: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # J v is the derivative of (J^T u) v with respect to u, so the truth needs backward only.
        call = spec.leaves(call)
        results = moving(spec, call.map(lambda t: t).call(function))  # type: ignore[arg-type]
        u = [torch.zeros_like(result, requires_grad=True) for result in results]
        inputs = [call.args[i] for i in spec.wanted(call)]
        back = torch.autograd.grad(results, inputs, u, create_graph=True)
        total = sum((b * v).sum() for b, v in zip(back, along, strict=True))
        return torch.autograd.grad(total, u)  # type: ignore[arg-type]

    truth = exact(spec, sample)
    wide = tuple(v.double() for v in directions)
    expected = product(spec.reference, truth, wide)
    terms = spec.gradient_magnitude or spec.reference
    sizes = tuple(v.abs() for v in wide)
    magnitude = product(terms, truth, sizes)
    moved = product(spec.output_sensitivity or terms, truth, sizes)
    other = product(spec.composite, sample, directions)
    for group, place in each((found, expected, other, magnitude, moved), where):
        one, wanted, plain, size, change = group
        allowed = size.abs() + wanted.abs()
        if spec.output_sensitivity is not None:
            allowed = allowed + half_step(one.dtype) * change.abs()
        require_close(one, wanted, plain, allowed, place)


@check(dtypes=FLOATING, needs="differentiable")
def func_jvp(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """torch.func.jvp gives the values and the Jacobian-vector products."""
    sample = spec.typical(device, dtype)
    wanted = spec.wanted(sample)
    pair: Any = torch.func.jvp(
        sample.bind(spec.op, wanted), sample.take(wanted), tangents(spec, sample)
    )
    output, tangent = pair
    where = Where(spec, "func_jvp", sample)
    require_values(output, sample, where)
    require_tangents(moving(spec, tangent), sample, where)


@check(dtypes=FLOATING, needs="differentiable")
def forward_mode(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Dual tensors give results with the tangents of forward-mode differentiation."""
    sample = spec.typical(device, dtype)
    with forward_ad.dual_level():
        duals = sample
        for i, direction in zip(spec.wanted(sample), tangents(spec, sample), strict=True):
            duals = duals.substitute(i, forward_ad.make_dual(sample.args[i], direction))
        unpacked = [forward_ad.unpack_dual(output) for output in outputs(duals.call(spec.op))]
        where = Where(spec, "forward_mode", sample)
        require_values(tuple(primal for primal, _ in unpacked), sample, where)
        due: tuple[Any, ...] = moving(spec, tuple(tangent for _, tangent in unpacked))
        found = tuple(tangent for tangent in due if tangent is not None)
        require(len(found) == len(due), where, "an output has no tangent")
        require_tangents(found, sample, where)


@check(dtypes=FLOATING, needs="differentiable")
def retained_graph(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """A second backward through a retained graph gives the same gradients as the first."""
    sample = spec.typical(device, dtype, requires_grad=True)
    wanted = spec.wanted(sample)
    results = outputs(sample.call(spec.op))
    inputs = [sample.args[i] for i in wanted]
    grads = incoming(spec, results)
    where = Where(spec, "retained_graph", sample)
    for _ in range(2):
        found = gradients(results, inputs, grads, retain_graph=True)
        require_gradients(found, sample, wanted, grads, where)
