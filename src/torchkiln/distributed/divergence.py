"""The divergence of two linear layers whose classes are distributed over processes.

With P and Q the shares of a shard's classes in both distributions, and p and q the distributions
within the shard, the divergence of q from p over all classes is the sum over the shards of
``Q * (log(Q / P) + the divergence of q from p)``. So each process computes the divergence of its
classes as if they were all, and one exchange joins the numbers of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from torchkiln.distributed.class_shards import (
    gather_into,
    layer_in_autocast,
    local_of,
    shard_of_distributed,
)
from torchkiln.distributed.logprob import among_zeros, counted_rows
from torchkiln.typing import Direction

NAME = "vocab_parallel_linear_kl"
OPPOSITE: dict[Direction, Direction] = {"forward": "reverse", "reverse": "forward", "js": "js"}


class Layer(NamedTuple):
    """A linear layer and the rows that it is applied to."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Pair:
    """A student and a teacher, whose layers have the classes of this process."""

    student: Layer
    teacher: Layer
    group: dist.ProcessGroup | None
    temperature: float
    direction: Direction
    beta: float

    def exchanged(self) -> Pair:
        """The same divergence with the layers exchanged."""
        options = (self.group, self.temperature, OPPOSITE[self.direction], 1 - self.beta)
        return Pair(self.teacher, self.student, *options)

    def arguments(self, direction: Direction) -> tuple[Any, ...]:
        """The arguments that both ops have."""
        (x, weight, bias), (y, weight_y, bias_y) = self.student, self.teacher
        options = (self.temperature, direction, self.beta, None)
        return (x, weight, y, weight_y, bias, bias_y, *options)

    def numbers(self, direction: Direction, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The divergence and the state, ``[2, 3, rows]``: log-sum-exp, mass, terms of each layer.

        Without ``state``, both are computed as if the classes of this process were all classes.
        With the state of all classes, they are the part that the classes of this process
        contribute.
        """
        flat = None if state is None else state.flatten()
        found, own, _ = torch.ops.torchkiln._linear_kl_forward.default(
            *self.arguments(direction), flat, False
        )
        return found, own.view(2, 3, found.numel())

    def joined(self) -> tuple[Tensor, Tensor]:
        """The divergence and the state over all classes; communicates once, for js twice."""
        is_js = self.direction == "js"
        found, own = self.numbers("forward" if is_js else self.direction)
        for numbers, layer in zip(own, (self.student, self.teacher), strict=True):
            if layer.bias is not None:  # all classes may have probability 0, such as padding
                numbers[0].masked_fill_((layer.bias == -torch.inf).all(), -torch.inf)
        numbers = own[:, :2].flatten(0, 1)
        if not is_js:
            numbers = torch.cat([numbers, found.unsqueeze(0)])
        parts = numbers.new_empty(dist.get_world_size(self.group), *numbers.shape)
        gather_into(parts.flatten(0, 1), numbers.contiguous(), group=self.group)
        (student, log_p), (teacher, log_q) = whole(parts[:, :2]), whole(parts[:, 2:4])
        state = torch.stack([student, teacher])
        if is_js:
            # The mixture of a shard depends on the shares of both distributions.
            terms = self.numbers("js", state)[1][:, 2].contiguous()
            dist.all_reduce(terms, group=self.group)
        else:
            terms = torch.zeros_like(state[:, 2])
            is_forward = self.direction == "forward"
            shares = (log_q, log_p) if is_forward else (log_p, log_q)
            terms[int(is_forward)] = divergence(*shares, parts[:, 4])
        state[:, 2] = terms
        return terms.sum(0), state

    def gradients(self, grad: Tensor, state: Tensor, wanted: list[bool]) -> list[Tensor | None]:
        """The gradients of the student's x, weight and bias; None if not wanted."""
        if not any(wanted):
            return [None] * 3
        found = torch.ops.torchkiln._linear_kl_backward.default(
            *self.arguments(self.direction), grad, state.flatten(), wanted
        )
        if wanted[0]:
            dist.all_reduce(found[0], group=self.group)
        return [
            each.to(like.dtype) if is_wanted and like is not None else None
            for each, like, is_wanted in zip(found, self.student, wanted, strict=True)
        ]


def whole(parts: Tensor) -> tuple[Tensor, Tensor]:
    """The state of a layer, and the logarithms of the shares of shards.

    ``parts`` is ``[shards, 2, rows]``: log-sum-exps and masses. The terms of the state,
    ``[3, rows]``, are 0.
    """
    log_sum_exps, masses = parts.unbind(1)
    maximum = log_sum_exps.amax(0)
    is_empty = log_sum_exps == -torch.inf
    distance = log_sum_exps - maximum - masses.log()
    distance = distance.masked_fill(is_empty, -torch.inf)
    log_sum = torch.logsumexp(distance, 0)
    log_sum_exp = maximum + log_sum
    # The kernels subtract the rounded log_sum_exp; the mass corrects for the rounding.
    rounding = (maximum - log_sum_exp) + log_sum
    mass = torch.where(rounding.isfinite(), (-rounding).exp(), 1)
    return torch.stack([log_sum_exp, mass, torch.zeros_like(mass)]), distance - log_sum


def divergence(log_p: Tensor, log_q: Tensor, within: Tensor) -> Tensor:
    """The divergence from q to p, from shares of shards and the divergences within them."""
    p = log_p.exp()
    within = within.masked_fill(log_q == -torch.inf, 0)  # NaN where q has no class in the shard
    return (p * ((log_p - log_q) + within)).masked_fill(p == 0, 0).sum(0)


class ShardedLinearKL(torch.autograd.Function):
    """The divergence of each row. Backward adds the gradients of x and of y of all processes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """The divergence, equal on all processes; the arguments are both layers, then options."""
        pair = Pair(Layer(*args[:3]), Layer(*args[3:6]), *args[6:])
        found, state = pair.joined()
        ctx.options = args[6:]
        ctx.save_for_backward(*args[:6], state)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of both layers."""
        *tensors, state = ctx.saved_tensors
        pair = Pair(Layer(*tensors[:3]), Layer(*tensors[3:]), *ctx.options)
        wanted = list(ctx.needs_input_grad[:6])
        own = pair.gradients(grad, state, wanted[:3])
        other = pair.exchanged().gradients(grad, state.flip(0), wanted[3:])
        return (*own, *other, *[None] * len(ctx.options))


def vocab_parallel_linear_kl(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    weight_y: Tensor,
    bias: Tensor | None = None,
    bias_y: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    temperature: float = 1.0,
    direction: Direction = "forward",
    beta: float = 0.5,
    rows: Tensor | None = None,
) -> Tensor:
    """Returns :func:`torchkiln.linear_kl` of two layers whose classes are distributed.

    Each process has the rows of ``weight`` and ``weight_y`` for the same classes, at least one, or
    two ``DTensor`` that are sharded in their first dimension, over one mesh dimension; ``bias`` and
    ``bias_y`` hold the same classes. Classes may be distributed in any parts. ``x``, ``y`` and
    ``rows`` are equal on all processes; if they are ``DTensor``, they are replicated. ``group``:
    the processes, None for all; a ``DTensor`` replaces it. The other arguments are those of
    :func:`torchkiln.linear_kl`.

    Logits are computed for a chunk of rows at a time, again in backward. Forward gathers five
    numbers per row and process once. For ``js`` it gathers four, computes the logits a second time,
    and adds two numbers per row, because the mixture of a class depends on all classes. Backward
    adds the gradients of ``x``, and of ``y`` if it requires one, of all processes. There is no
    second derivative. Rows that ``rows`` leaves out cost neither product nor communication.
    """
    weights = [each for each in (weight, weight_y) if isinstance(each, DTensor)]
    shards = {shard_of_distributed(NAME, each, 0) for each in weights}
    if len(shards) > 1:
        raise ValueError(
            f"torchkiln.{NAME}: weight_y: got placements {weights[1].placements} of "
            f"{list(weights[1].shape)}, expected the classes of weight, placements "
            f"{weights[0].placements} of {list(weights[0].shape)}; call redistribute()"
        )
    if shards:
        group = shards.pop().group
    student = layer_in_autocast(local_of(x), local_of(weight), local_of(bias))
    teacher = layer_in_autocast(local_of(y), local_of(weight_y), local_of(bias_y))
    shape, some, layers = student[0].shape[:-1], None, []
    if teacher[0].shape[:-1] != shape:
        raise ValueError(
            f"torchkiln.{NAME}: y: got shape {list(y.shape)}, expected the rows of x, whose shape "
            f"is {list(x.shape)}"
        )
    if rows is not None:
        some = counted_rows(NAME, local_of(rows), shape)
    for states, *parameters in (student, teacher):
        flat = states.reshape(-1, states.shape[-1])
        layers += [flat if some is None else flat.index_select(0, some), *parameters]
    with torch.autocast(student[0].device.type, enabled=False):
        found: Tensor = ShardedLinearKL.apply(  # type: ignore[no-untyped-call]
            *layers, group, temperature, direction, beta
        )
    return found.view(shape) if some is None else among_zeros(found, some, shape)
