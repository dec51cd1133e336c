"""Calls whose tensors have two floating dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchkiln.ops._traced import joined, place_of
from torchkiln.testing.check import check
from torchkiln.testing.compare import (
    Where,
    outputs,
    require,
    require_gradients,
    require_same,
    require_values,
    vector_jacobian,
)
from torchkiln.testing.contract.gradients import incoming
from torchkiln.testing.contract.values import TINY
from torchkiln.testing.refusals import GoodCall, Refusals, kinds_of
from torchkiln.testing.sample import FLOATING, Result, Sample
from torchkiln.testing.spec import OpSpec


def floating(spec: OpSpec, sample: Sample) -> dict[str, Tensor]:
    """The floating point tensors of a call by the names of their arguments."""
    given = dict(zip(kinds_of(spec.overload), sample.args, strict=False)) | dict(sample.kwargs)
    return {n: t for n, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()}


def parameters(rules: Refusals) -> set[str]:
    """Arguments that may be float32 with half precision, and do not change the result's dtype."""
    found = set(rules.parameters)
    same = {**rules.like, **rules.dtypes}
    return found | {name for name, of in same.items() if of in found}


def mixed_calls(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """For each tensor argument the first small call with several tensors, cast to other dtypes."""
    seen: set[str] = set()
    for sample in spec.samples(device, dtype):
        tensors = floating(spec, sample)
        if len(tensors) < 2 or sample.numel > TINY or sample.kwargs.get("dtype") is not None:
            continue
        for name in [name for name in tensors if name not in seen]:
            seen.add(name)
            for other in FLOATING:
                if other != dtype and other in spec.dtypes:
                    call = GoodCall(spec.overload, sample)
                    mixed = call.replaced({name: tensors[name].to(other)})
                    yield replace(mixed, name=f"{sample.name}, {name} in {other}")


def composes(spec: OpSpec, sample: Sample, dtype: torch.dtype) -> bool:
    """Whether torch's composite accepts the dtypes of a call, and returns ``dtype``."""
    try:
        return all(output.dtype == dtype for output in outputs(sample.call(spec.composite)))
    except (RuntimeError, TypeError, ValueError):
        return False


def in_one_dtype(function: Callable[..., Result], dtype: torch.dtype) -> Callable[..., Result]:
    """``function`` with all floating point arguments and results cast to one dtype."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        return tuple(map(cast, outputs(Sample("", args, kwargs).map(cast).call(function))))

    return call


@check(dtypes=FLOATING, needs="through_ops")
def mixed_dtypes(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """A tensor of another dtype is refused, or the result has the dtype that all promote to.

    Parameters, which the spec names, take no part in the promotion. Values and gradients are right.
    """
    rules = spec.refusals or Refusals()
    for sample in mixed_calls(spec, device, dtype):
        where = Where(spec, "mixed_dtypes", sample)
        try:
            found = outputs(sample.call(spec.op))
        except (RuntimeError, TypeError, ValueError):
            continue  # bad_input checks the message
        tensors = floating(spec, sample)
        due = joined(place_of(t) for name, t in tensors.items() if name not in parameters(rules))
        for output in found:
            require(output.dtype == due, where, f"found {output.dtype}, expected {due}")
        if not composes(spec, sample, due):
            own = in_one_dtype(spec.composite, due)
            where = Where(replace(spec, composite=own), "mixed_dtypes", sample)
        require_values(found, sample, where)
        wanted = spec.wanted(sample)
        if not wanted:
            continue
        leaves = spec.leaves(sample)
        require_same(outputs(leaves.call(spec.op)), found, where.at("recorded"))
        grads = incoming(spec, found)
        gradients = vector_jacobian(spec.op, leaves, wanted, grads)
        require_gradients(gradients, sample, wanted, grads, where)
