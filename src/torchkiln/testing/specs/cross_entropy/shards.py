"""The contracts of losses whose classes lie in shards, with all shards in one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchkiln.testing.check import UnavailableError
from torchkiln.testing.forms import COMPUTED_SIZES, TRANSFORMS
from torchkiln.testing.sample import Sample
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.cross_entropy import logits, logprob

ops = torch.ops.torchkiln
ONE_PROCESS = "backward of a shard is for reverse mode and first derivatives"


@dataclass(frozen=True)
class Shard:
    """Adjacent classes of rows."""

    first: int
    end: int
    classes: int
    """The number of classes of all shards."""

    def of(self, tensor: Tensor) -> Tensor:
        """The classes of this shard, of logits or of a vector with a number per class."""
        return tensor[..., self.first : self.end]


def shards(classes: int) -> list[Shard]:
    """Shards of different widths, at least one class each."""
    cuts = (0, classes // 3, classes // 2, classes) if classes > 3 else (0, classes)
    return [Shard(first, end, classes) for first, end in pairwise(cuts)]


class Loss(torch.autograd.Function):
    """The losses of rows, joined from the results of the op for each shard."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignored: int,
        smoothing: float,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        """The loss and the weight of each row."""
        from torchkiln.distributed.class_shards import join  # noqa: PLC0415

        numbers = []
        for shard in shards(rows.shape[-1]):
            own = None if weight is None else shard.of(weight)
            numbers.append(
                ops._cross_entropy_shard.default(
                    *(shard.of(rows), target, own),
                    *(ignored, smoothing, shard.first, shard.classes),
                )
            )
        loss, state, of_target = join(torch.stack(numbers), target == ignored, z_loss)
        ctx.save_for_backward(rows, target, weight, state)
        ctx.options = (ignored, smoothing)
        ctx.mark_non_differentiable(of_target)
        return loss, of_target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the shards, side by side."""
        rows, target, weight, state = ctx.saved_tensors
        found = []
        for shard in shards(rows.shape[-1]):
            own = None if weight is None else shard.of(weight)
            found.append(
                ops._cross_entropy_shard_backward.default(
                    *(grad, shard.of(rows), target, own, state),
                    *(*ctx.options, shard.first, shard.classes),
                )
            )
        return torch.cat(found, -1), None, None, None, None, None


def require_distributed() -> None:
    """Raise UnavailableError without torch.distributed, which the functions that join need."""
    if not dist.is_available():
        raise UnavailableError("this torch has no torch.distributed")


def loss(
    x: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_dtype: torch.dtype | None = None,
) -> Tensor:
    """``cross_entropy`` of a matrix of logits, or of one row."""
    require_distributed()
    rows = x.reshape(-1, x.shape[-1])
    found, of_target = Loss.apply(  # type: ignore[no-untyped-call]
        rows, target.reshape(-1), weight, ignore_index, label_smoothing, z_loss
    )
    dtype = loss_dtype or x.dtype
    if reduction == "none":
        return found.view(target.shape).to(dtype)
    total = found.sum()
    return (total if reduction == "sum" else total / of_target.sum()).to(dtype)


class Logprob(torch.autograd.Function):
    """Log-probabilities and entropies of rows, joined from the results of the op for each shard."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, target: Tensor, temperature: float, ignored: int
    ) -> tuple[Tensor, Tensor]:
        """Both numbers of each row."""
        from torchkiln.distributed.logprob import join  # noqa: PLC0415

        numbers = [
            ops._logprob_shard.default(
                *(shard.of(rows), target, temperature, ignored, shard.first, shard.classes)
            )
            for shard in shards(rows.shape[-1])
        ]
        logp, entropy, state = join(torch.stack(numbers), target == ignored)
        ctx.save_for_backward(rows, target, state)
        ctx.options = (temperature, ignored)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the shards, side by side."""
        rows, target, state = ctx.saved_tensors
        found = [
            ops._logprob_shard_backward.default(
                *(grads[0], shard.of(rows), target, grads[1], state),
                *(*ctx.options, shard.first, shard.classes),
            )
            for shard in shards(rows.shape[-1])
        ]
        return torch.cat(found, -1), None, None, None


def both(
    x: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
) -> tuple[Tensor, ...]:
    """``logprob`` of logits of any rank."""
    require_distributed()
    rows = x.reshape(-1, x.shape[-1])
    found = Logprob.apply(  # type: ignore[no-untyped-call]
        rows, target.reshape(-1), temperature, ignore_index
    )
    kept: Sequence[Tensor] = found[: 1 + entropy]
    return tuple(y.view(target.shape) for y in kept)


@dataclass(frozen=True)
class Inputs:
    """The calls of an op with a class for each row of a matrix, whose rows are cut into shards."""

    parent: OpSpec
    op: Callable[..., Any]

    def __call__(self, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        """The calls whose classes are the last dimension, with options that shards have."""
        options = inspect.signature(self.op).parameters.keys()
        for call in self.parent.inputs(device, dtype):
            x, target = call.args[:2]
            names = call.kwargs.keys() - {"check_target"}
            is_of_rows = not target.is_floating_point() and x.shape[:-1] == target.shape
            if is_of_rows and names <= options:
                yield replace(call, kwargs={name: call.kwargs[name] for name in names})


def more_rows(sample: Sample) -> Sample:
    """The call with twice the rows, because the number of classes cannot change in a graph."""
    return sample.map(lambda t: torch.cat([t, t]))


def of_shards(parent: OpSpec, op: Any) -> OpSpec:
    """The contract of an op that is computed from shards."""
    name = f"_{parent.name}_shard"
    return replace(
        parent,
        name=f"{parent.name}_of_shards",
        op=op,
        overload=getattr(ops, name).default,
        composed=True,
        inputs=Inputs(parent, op),
        grown=more_rows,
        differentiable=(0,),
        refusals=None,
        invalid=None,
        module=None,
        module_inputs=None,
        helpers=(name, f"{name}_backward"),
        waits_for=(),
        forms=(),
        excluded={
            **dict.fromkeys((*TRANSFORMS, "gradcheck", "gradgradcheck"), ONE_PROCESS),
            "compile_aot_eager": COMPUTED_SIZES,
            "bad_input": "its callers check; tests/ops/test_cross_entropy_shard.py",
        },
    )


CROSS_ENTROPY = of_shards(logits.CROSS_ENTROPY, loss)
LOGPROB = of_shards(logprob.LOGPROB, both)
