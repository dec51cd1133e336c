"""The contracts of batch norm over processes: its parts in one process, and a group of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchkiln.ops.batch_norm import sync_bn_act
from torchkiln.testing.check import UnavailableError
from torchkiln.testing.forms import (
    COLLECTIVES,
    COMPUTED_SIZES,
    NO_BATCHES,
    TRANSFORMS,
    Renamed,
    Written,
    form_of,
)
from torchkiln.testing.sample import Invalid, Sample
from torchkiln.testing.specs.batch_norm import parts, whole
from torchkiln.typing import Activation

ops = torch.ops.torchkiln
HELPERS = (
    *("_sync_bn_moments", "_sync_bn_statistics", "_sync_bn_forward"),
    *("_sync_bn_backward_sums", "_sync_bn_backward_input"),
)
REVERSE_MODE = dict.fromkeys(
    (*TRANSFORMS, "gradcheck", "gradgradcheck", "gradients_that_are_recorded"), COLLECTIVES
)


def counts_of(x: Tensor) -> list[int]:
    """The numbers of images of three processes; fewer than three images are all in the first."""
    each = x.shape[0] // 3
    return [x.shape[0] - 2 * each, each, each]


class Parts(torch.autograd.Function):
    """``bn_act`` in training, with the images of several processes in this one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        act: str,
        eps: float,
        counts: list[int],
    ) -> Tensor:
        """The results, by the statistics of all images."""
        images = x.split(counts)
        added = [None] * len(images) if residual is None else residual.split(counts)
        moments = torch.stack([ops._sync_bn_moments.default(own) for own in images])
        statistics, count = ops._sync_bn_statistics.default(x, moments, None, None, None, 0.1, eps)
        found = [
            ops._sync_bn_forward.default(own, statistics, weight, bias, other, act)
            for own, other in zip(images, added, strict=True)
        ]
        results, signs = zip(*found, strict=True)
        ctx.save_for_backward(x, weight, bias, residual, statistics, count, *signs)
        ctx.act, ctx.counts = act, counts
        return torch.cat(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, by the sums over all images."""
        x, weight, bias, residual, statistics, count, *signs = ctx.saved_tensors
        act, counts, has_residual = ctx.act, ctx.counts, residual is not None
        reads = residual if has_residual and act not in ("relu", "none") else None
        added = [None] * len(signs) if reads is None else reads.split(counts)
        wanted = [True, weight is not None, bias is not None, has_residual]
        calls = []
        for own, g, other, sign in zip(
            x.split(counts), grad.split(counts), added, signs, strict=True
        ):
            sign_read = sign if has_residual and act == "relu" else None
            calls.append((g, own, (weight, bias, other, sign_read, act)))
        sums = [
            ops._sync_bn_backward_sums.default(g, own, statistics, count, *rest, wanted)
            for g, own, rest in calls
        ]
        coefficients, of_weight, of_bias, of_residual = zip(*sums, strict=True)
        total = torch.stack(coefficients).sum(0)
        of_x = [
            ops._sync_bn_backward_input.default(g, own, statistics, total, *rest)
            for g, own, rest in calls
        ]
        return (
            torch.cat(of_x),
            torch.stack(of_weight).sum(0) if wanted[1] else None,
            torch.stack(of_bias).sum(0) if wanted[2] else None,
            torch.cat(of_residual) if has_residual else None,
            *[None] * 3,
        )


def apart(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,  # noqa: ARG001
    running_var: Tensor | None = None,  # noqa: ARG001
    residual: Tensor | None = None,
    *,
    act: str = "relu",
    training: bool = True,  # noqa: ARG001
    eps: float = 1e-5,
) -> Tensor:
    """``bn_act`` in training, without running statistics."""
    found: Tensor = Parts.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, residual, act, eps, counts_of(x)
    )
    return found


def apart_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The calls in training with twice the images, so that three processes have some.

    Parameters have at least float32, so that gradients of processes are added before they are
    rounded.
    """
    for call in parts.training_inputs(device, dtype):
        x, weight, bias, *_, residual = call.args
        if dtype.itemsize == 2 and weight is None and bias is not None:
            continue  # torch's batch norm has no float32 bias alone
        rows = [t if t is None else torch.cat([t, t]) for t in (x, residual)]
        wide = torch.promote_types(dtype, torch.float32)
        owned = [t if t is None else t.to(wide) for t in (weight, bias)]
        yield replace(call, args=(rows[0], *owned, None, None, rows[1]))


APART = replace(
    parts.FROM_MOMENTS,
    name="bn_act_of_processes",
    op=apart,
    overload=ops._sync_bn_forward.default,
    inputs=apart_inputs,
    helpers=HELPERS,
    excluded={
        **REVERSE_MODE,
        "compile_aot_eager": COMPUTED_SIZES,
        "bad_input": "the parts are called with checked arguments; test_sync_batch_norm.py",
    },
)


NAME = "torchkiln.testing.specs.batch_norm"
GROUPS: dict[str, Any] = {}
"""The group of this process by its name. Torch has only a weak reference, and forgets it whenever
another test calls ``destroy_process_group``."""


def make_group() -> None:
    """Make and register the group, without the state of ``init_process_group``."""
    if not dist.is_available():
        raise UnavailableError("this torch has no torch.distributed")
    registry: Any = torch._C._distributed_c10d
    try:
        registry._resolve_process_group(NAME)
    except RuntimeError:
        store = dist.HashStore()  # type: ignore[attr-defined]
        group: Any = dist.ProcessGroup(store, 0, 1)
        gloo = dist.ProcessGroupGloo(store, 0, 1, timedelta(minutes=1))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        group._set_group_name(NAME)
        registry._register_process_group(NAME, group)
        GROUPS[NAME] = group


def group_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The calls with running statistics."""
    make_group()
    for call in parts.running_inputs(device, dtype):
        names = call.kwargs.keys() - {"training"}
        yield replace(call, kwargs={name: call.kwargs[name] for name in names})


def of_group(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    act: Activation = "relu",
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """The function of ``torchkiln.nn.SyncBatchNormAct``, for the group of this process."""
    given: Any = (x, weight, bias, running_mean, running_var, residual)
    return sync_bn_act(*given, act=act, momentum=momentum, eps=eps, group=GROUPS[NAME])


def group_invalid(device: torch.device) -> Iterator[Invalid]:
    """The refused calls that do not depend on the mode."""
    for case in Renamed(whole.BN_ACT, "sync_bn_act")(device):
        if "training" not in case.message:
            yield case


SYNC = form_of(
    whole.BN_ACT,
    Written(
        of_group,
        ops._sync_bn_act.default,
        {"running_mean": None, "running_var": None},
        statistics=True,
        defaults={"batches": None, "moments": None, "group": NAME},
    ),
    called="sync_bn_act",
    kinds=False,
    inputs=group_inputs,
    invalid=group_invalid,
    reference=partial(parts.UPDATE.reference, training=True),
    composite=partial(parts.UPDATE.composite, training=True),
    magnitude=partial(parts.UPDATE.magnitude, training=True),
    gradient_magnitude=partial(parts.with_statistics, whole.gradient_magnitude, training=True),
    differentiable=whole.BN_ACT.differentiable,
    constant=(1, 2),
    helpers=HELPERS,
    devices=("cpu",),  # several GPUs have a group of NCCL in test_sync_batch_norm.py
    excluded={
        **REVERSE_MODE,
        "vmap": NO_BATCHES,
        "not_finite": parts.UPDATE.excluded["not_finite"],
        "opcheck": "torch's check compares arguments, but no groups; see opcheck_helpers",
    },
)
