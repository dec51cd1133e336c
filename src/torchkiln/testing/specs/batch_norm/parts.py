"""The contracts of batch norm that updates statistics, with known moments, and with a max pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln.testing.data import normal
from torchkiln.testing.forms import Written, form_of
from torchkiln.testing.sample import Sample
from torchkiln.testing.specs.batch_norm.whole import (
    BN_ACT,
    Arguments,
    composite,
    gradient_magnitude,
    inputs,
    magnitude,
    reference,
)

Function = Callable[..., Tensor]
ops = torch.ops.torchkiln
MOMENTUM = 0.3
NOT_MAPPED = "as in torch, statistics that are not mapped cannot be moved in a map"


def training_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The calls in training that have elements."""
    for call in inputs(device, dtype):
        if call.kwargs.get("training") and call.args[0].numel():
            yield call


def running_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The calls in training, with running statistics of the dtype of the parameters."""
    for call in training_inputs(device, dtype):
        owner = call.args[0] if call.args[1] is None else call.args[1]
        shape = call.args[0].shape[1:2]
        mean, var = (normal(name, shape, device, owner.dtype) for name in ("mean", "var"))
        moved = call.substitute(3, mean).substitute(4, var.abs() + 0.5)
        yield replace(moved, kwargs={**call.kwargs, "momentum": MOMENTUM})


def moved(given: Arguments, *, terms: bool = False) -> tuple[Tensor, Tensor]:
    """The running statistics after the call, or their magnitudes."""
    mean, var = given.running
    assert mean is not None
    assert var is not None
    x, count = given.x, given.x.numel() // given.x.shape[1]
    new_mean, new_var = given.moments
    if terms:
        mean, var, new_mean = mean.abs(), var.abs(), given.mean_of(x.abs())
        new_var = new_var + given.mean_of(2 * (x - given.moments[0]).abs() * (x.abs() + new_mean))
    new_var = new_var * count / max(count - 1, 1)
    pairs = ((mean, new_mean), (var, new_var))
    first, second = (
        (1 - MOMENTUM) * old + MOMENTUM * new.flatten().to(old.dtype) for old, new in pairs
    )
    return first, second


def with_statistics(
    function: Function, *args: Any, terms: bool = False, **kwargs: Any
) -> tuple[Tensor, ...]:
    """The result of a function, and the running statistics after the call."""
    given = Arguments(*args, **kwargs)
    y = function(*args, **kwargs)
    with torch.no_grad():
        return y, *moved(given, terms=terms)


UPDATE = form_of(
    BN_ACT,
    Written(
        torchkiln.bn_act,
        ops._bn_act_update.default,
        {"running_mean": None, "running_var": None},
        statistics=True,
    ),
    called="bn_act",
    kinds=False,
    excluded={
        "vmap": NOT_MAPPED,
        "vmap_of_grad": NOT_MAPPED,
        "not_finite": "statistics of a channel with an infinity are NaN; bn_act compares results",
    },
    inputs=running_inputs,
    reference=partial(with_statistics, reference),
    composite=partial(with_statistics, composite),
    magnitude=partial(with_statistics, magnitude, terms=True),
    gradient_magnitude=partial(with_statistics, gradient_magnitude),
    differentiable=BN_ACT.differentiable,
    constant=(1, 2),
    helpers=("_bn_act_update_forward", "_bn_act_backward"),
)


def by_moments(
    x: Tensor,
    *parts: Tensor | None,
    act: str = "relu",
    training: bool = True,  # noqa: ARG001
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch norm by the moments of x, which another op computes."""
    moments = ops._sync_bn_moments.default(x.detach())[None]
    every = [*parts, *[None] * (5 - len(parts))]
    found: Tensor = ops._bn_act_from_moments.default(x, moments, *every, act, momentum, eps)
    return found


FROM_MOMENTS = replace(
    BN_ACT,
    name="bn_act_from_moments",
    op=by_moments,
    overload=ops._bn_act_from_moments.default,
    composed=True,
    inputs=training_inputs,
    refusals=None,
    invalid=None,
    large=None,
    module=None,
    helpers=("_sync_bn_moments", "_bn_act_from_moments_forward", "_bn_act_backward"),
    excluded={
        "aot_inductor": "for fuse; AOTInductor of torch 2.13 fails: getitem is no OpOverload",
        "bad_input": "the moments have no public argument; tests/ops/test_conv_moments.py",
    },
)

WINDOWS = ([3, 3], [2, 2], [1, 1])


def pool_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Calls on images with adjacent channels in whole vectors."""
    for name, shape in {
        "typical": (2, 8, 6, 6),
        "odd": (3, 24, 9, 7),
        "wide": (1, 64, 5, 17),
    }.items():
        x = normal("x", shape, device, dtype).contiguous(memory_format=torch.channels_last)
        row = [normal(each, shape[1:2], device, dtype) for each in ("weight", "bias")]
        for act in ("relu", "silu"):
            yield Sample(f"{name}, {act}", (x, *row, None, None, act, 0.1, 1e-5, *WINDOWS))


def pooled(function: Function, *args: Any) -> Tensor:
    """The max pool of the results of a function of bn_act's arguments."""
    x, weight, bias, _, _, act, _, eps, *windows = args
    y = function(x, weight, bias, act=act, eps=eps, training=True)
    return F.max_pool2d(y, *windows)


def picked(function: Function, *args: Any) -> Tensor:
    """The elements of a function's result that the max pool selects."""
    x, weight, bias, _, _, act, _, eps, *windows = args
    options: dict[str, Any] = {"act": act, "eps": eps, "training": True}
    with torch.no_grad():
        _, at = F.max_pool2d(reference(x, weight, bias, **options), *windows, return_indices=True)
    y = function(x, weight, bias, **options)
    return y.flatten(2).gather(2, at.flatten(2)).reshape(at.shape)


POOL = replace(
    BN_ACT,
    name="bn_act_pool",
    op=ops._bn_act_pool.default,
    overload=ops._bn_act_pool.default,
    devices=("cuda",),
    dtypes=(torch.float32,),  # in half precision another element may be the largest
    inputs=pool_inputs,
    reference=partial(pooled, reference),
    composite=partial(pooled, composite),
    magnitude=partial(picked, magnitude),
    gradient_magnitude=partial(picked, gradient_magnitude),
    differentiable=(0, 1, 2),
    refusals=None,
    invalid=None,
    large=None,
    module=None,
    helpers=("_bn_act_pool_forward", "_bn_act_pool_backward"),
    excluded={
        "bad_input": "torchkiln.fuse calls it where it applies; tests/ops/test_pool.py",
        "strides": "it takes images with adjacent channels; tests/ops/test_pool.py",
        "gradient_strides": "it takes images with adjacent channels; tests/ops/test_pool.py",
        "vmap": "torchkiln.fuse does not call it in transforms",
        "vmap_of_grad": "torchkiln.fuse does not call it in transforms",
        "not_finite": "windows of -infinity and NaN are compared in tests/ops/test_pool.py",
        "subclasses": "torchkiln.fuse does not call it with subclasses",
        "fork_of_a_cpu_only_parent": "it has no kernel for a CPU",
        **dict.fromkeys(
            (
                *("meta_and_fake", "export", "compile_aot_eager", "compile_inductor"),
                "no_recompilation_storm",
            ),
            "it takes images with adjacent channels, which the check does not keep",
        ),
    },
)
